"""The base class of a recipe's sections, and the types of their values. Imports no torch."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from codistill.errors import unknown
from codistill.networks.families import RESERVED, parse
from codistill.recipes.datasets import DATASETS
from codistill.recipes.errors import Contradiction, Path, RecipeError, describe_contradictions, problems
from codistill.transfer import methods


def _network(name: str) -> str:
    parse(name)
    return name


def _member(name: str) -> str:
    if name in RESERVED:
        raise ValueError(
            f"a network cannot be called {name!r}, which means something else already; choose another name"
        )
    return name


def _method(name: str) -> str:
    if name not in (*methods.NAMES, methods.CUSTOM):
        raise unknown("method", name, (*methods.NAMES, methods.CUSTOM))
    return name


def _data_set(name: str) -> str:
    if name not in DATASETS:
        raise unknown("value", name, DATASETS)
    return name


Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
# A member's name becomes a file's name, a module's name and a part of "a/final->b/stage2".
MemberName = Annotated[str, Field(pattern="^[A-Za-z0-9-][A-Za-z0-9_-]{0,39}$"), AfterValidator(_member)]
KnownNetwork = Annotated[str, AfterValidator(_network)]
KnownMethod = Annotated[str, AfterValidator(_method)]
KnownDataSet = Annotated[str, AfterValidator(_data_set), Field(json_schema_extra={"enum": list(DATASETS)})]


class Settings(BaseModel):
    """Base class of a recipe's sections: frozen, no unknown keys, no silent coercion, no infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    stand_ins: ClassVar[Mapping[str, Any]] = {}
    """Valid parts that replace the invalid ones while the rest is checked."""

    @classmethod
    def check(cls, values: object, source: str = "recipe", places: Mapping[Path, str] | None = None) -> Self:
        """Validate ``values``; raise one RecipeError with everything that is wrong with them.

        ``source`` is what the error calls them, ``places`` maps each path to where it was written.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            details = error.errors(include_url=False)
        broken = {str(detail["loc"][0]) for detail in details if detail["loc"]}
        found = cls._contradictions_beyond(broken, values) if broken and isinstance(values, Mapping) else []
        raise RecipeError(
            [*problems(details, cls, places or {}), *describe_contradictions(found, places or {})], source
        )

    @classmethod
    def _contradictions_beyond(cls, broken: set[str], values: Mapping[str, Any]) -> list[Contradiction]:
        """Contradictions among the valid parts, which pydantic does not look for once a part is invalid."""
        sound = {key: value for key, value in values.items() if key not in broken}
        try:
            cls.model_validate({**cls.stand_ins, **sound})
        except ValidationError as error:
            cause = error.errors()[0].get("ctx", {}).get("error")
            return [one for one in getattr(cause, "found", ()) if not one.about & broken]
        return []
