"""Small harms to files, each a function of a ``random.Random``: to text, bytes, and what their formats allow."""

import io
import json
import random
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

NASTY = [
    *("null", "~", "true", "on", "-1", "0", "1e400", ".nan", ".inf", "9" * 400, "0x10", "1_000", "''", '""', "''''"),
    *("[]", "{}", "[[[[", "}", "&a [*a]", "*a", "!!python/object/apply:os.system ['touch MARKER']", "!!binary aa=="),
    *("<<: *x", "? a", "- -", "%TAG ! x", "---", "...", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1")),
    *("../../etc/passwd", "/dev/zero", "$(touch MARKER)", "`id`", "%s%n", "{0.__class__}", "a/final->a/final"),
    *("wrn-10-1", "wrn-999999-1", "resnet-8", "densenet-40-12", "kd", "dcm", "sgd", "adamw", "cosine", "folder"),
]
JSON_VALUES = [
    *("null", "true", "false", "0", "-1", "1", "0.5", "1e308", "1e999", "Infinity", "-Infinity", "NaN", "4294967296"),
    *("9223372036854775808", "9" * 400, "-" + "9" * 400, '""', '"x"', "[]", "{}", "[1]", '{"a": 1}', "[[], {}]"),
    *('"../../x"', '"/dev/zero"', '"wrn-999999-1"', r'"\u001b[2J\u0007\r\n"', r'"\ud800"', '"\\u0000"', '"<script>"'),
    *("[" * 400 + "]" * 400, "[" * 100_000, '{"a":' * 400 + "1" + "}" * 400, f'"{"x" * 1_000_000}"'),
    *("[" + "1," * 50_000 + "1]", '"1"', '"NaN"', "1e-320", "2147483648"),
]
MARK = "here it goes"


def with_character(written: str, chance: random.Random) -> str:
    place = chance.randrange(len(written) + 1)
    return written[:place] + chr(chance.choice([*range(128), 0x85, 0x2028, 0xFEFF])) + written[place:]


def without_some(written: str, chance: random.Random) -> str:
    place = chance.randrange(len(written) + 1)
    return written[:place] + written[place + chance.randint(1, 9) :]


def with_other_line(written: str, chance: random.Random) -> str:
    """Another value, indentation or order, a line twice, none of the rest."""
    lines = written.split("\n")
    at, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    changed = {
        "value": [lines[at].split(":")[0] + ": " + chance.choice([*NASTY, "0.5", "1", "2"])],
        "indentation": [chance.choice(["  ", "\t", " "]) + lines[at]],
        "order": [lines[other], lines[at]],
        "line": [chance.choice(NASTY)],
    }
    kind = chance.choice([*changed, "end"])
    return "\n".join(lines[:at] if kind == "end" else [*lines[:at], *changed[kind], *lines[at + 1 :]])


def mutated(written: str, chance: random.Random) -> str:
    """One to three small harms to text."""
    for _ in range(chance.randint(1, 3)):
        written = chance.choice([with_character, without_some, with_other_line, with_other_line])(written, chance)
    return written


def other_bytes(content: bytes, chance: random.Random) -> bytes:
    """A flipped bit, a part that is missing, zero, repeated or random, or something else altogether."""
    at = chance.randrange(len(content) + 1)
    length = chance.choice([1, 2, 8, 100, 4096])
    kind = chance.choice(["bit", "bit", "bit", "cut", "gone", "zero", "twice", "noise", "more", "other"])
    match kind:
        case "bit" if content:
            changed = bytearray(content)
            changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            return bytes(changed)
        case "cut":
            return content[:at]
        case "gone":
            return content[:at] + content[at + length :]
        case "zero":
            return content[:at] + bytes(len(content[at : at + length])) + content[at + length :]
        case "twice":
            return content[: at + length] + content[at:]
        case "noise":
            return content[:at] + chance.randbytes(len(content[at : at + length])) + content[at + length :]
        case "more":
            return content + chance.randbytes(length)
    return chance.choice([b"", b"\0", b"\n", b"\xff\xfe", b"null", b"[]", b"{}", b"0", chance.randbytes(64)])


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*path, key))


def other_json(content: bytes, chance: random.Random) -> bytes:
    """Another type or value in one place, one place less, or one more; keys high up as likely as those far down."""
    value = json.loads(content)
    by_depth: dict[int, list[tuple[Any, ...]]] = {}
    for path in paths(value):
        by_depth.setdefault(len(path), []).append(path)
    path = chance.choice(by_depth[chance.choice(list(by_depth))])
    raw = chance.choice(JSON_VALUES)
    if not path:
        return raw.encode()
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    match chance.choice(["value", "value", "value", "list", "object", "gone", "renamed", "more"]):
        case "value":
            parent[path[-1]] = MARK
        case "list":
            parent[path[-1]] = [parent[path[-1]]]
        case "object":
            parent[path[-1]] = {"a": parent[path[-1]]}
        case "gone":
            del parent[path[-1]]
        case "renamed" if isinstance(parent, dict):
            parent[chance.choice(["", "x", "../x", "\x1b[2J", "é", "a/final"])] = parent.pop(path[-1])
        case _ if isinstance(parent, dict):
            parent[chance.choice(["", "more", "format", "\x1b[2J"])] = MARK
        case _:
            parent.append(MARK)
    return json.dumps(value).replace(f'"{MARK}"', raw).encode()


def other_lines(content: bytes, chance: random.Random) -> bytes:
    """One line of JSON Lines changed, missing, twice or in another place."""
    lines = content.split(b"\n")
    at = chance.randrange(len(lines))
    match chance.choice(["value", "value", "value", "gone", "twice", "swapped"]):
        case "value" if lines[at]:
            lines[at] = other_json(lines[at], chance)
        case "gone":
            del lines[at]
        case "twice":
            lines.insert(at, lines[at])
        case _:
            other = chance.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
    return b"\n".join(lines)


def other_yaml(content: bytes, chance: random.Random) -> bytes:
    return mutated(content.decode(), chance).encode("utf-8", "surrogatepass")


def other_safetensors(content: bytes, chance: random.Random) -> bytes:
    """Another header, or another text in its metadata, with the length that fits."""
    (length,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length]
    values = json.loads(header)
    metadata = values.get("__metadata__", {})
    texts = [key for key, text in metadata.items() if text.startswith("{")]
    if texts and chance.random() < 0.5:
        metadata[texts[0]] = other_json(metadata[texts[0]].encode(), chance).decode("utf-8", "surrogatepass")
        header = json.dumps(values).encode()
    else:
        header = other_json(header, chance)
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def other_onnx(content: bytes, chance: random.Random) -> bytes:
    """Other shapes, names and operators, data in another file, and constants that are far larger than the file."""
    import onnx

    model = onnx.load_from_string(content)
    graph = model.graph
    tensor, node = chance.choice(graph.initializer), chance.choice(graph.node)
    match chance.choice(["dims", "outside", "operator", "input", "gone", "constant", "output"]):
        case "dims":
            tensor.dims[:] = chance.choice([[], [0], [-1], [2**40], [2**31, 2**31], [1] * 1000])
        case "outside":
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=chance.choice(["/etc/passwd", "../x", "/dev/zero", ""]))
        case "operator":
            node.op_type, node.domain = chance.choice(["Conv", "Loop", "Foo", "Reshape", ""]), chance.choice(["", "x"])
        case "input" if node.input:
            node.input[0] = chance.choice([graph.output[0].name, "nothing", ""])
        case "gone":
            graph.node.remove(node)
        case "constant":
            shape = onnx.helper.make_tensor("shape of it", onnx.TensorProto.INT64, [2], [40_000, 40_000])
            graph.initializer.append(shape)
            graph.node.append(onnx.helper.make_node("ConstantOfShape", ["shape of it"], ["zeros"]))
            graph.output.add(name="zeros")
        case _:
            graph.output[0].name = "other"
    return bytes(model.SerializeToString())


def other_picture(content: bytes, chance: random.Random) -> bytes:
    """A PNG with one chunk changed, missing, repeated or new, and checksums that fit; JPEG only as bytes."""
    if not content.startswith(b"\x89PNG"):
        return other_bytes(content, chance)
    chunks, at = [], 8
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        chunks.append((content[at + 4 : at + 8], content[at + 8 : at + 8 + length]))
        at += 12 + length
    number = chance.randrange(len(chunks))
    kind, data = chunks[number]
    match chance.choice(["size", "size", "bomb", "kind", "data", "gone", "twice", "text", "new"]):
        case "size":
            side = chance.choice([0, 1, 5_000, 9_300, 20_000, 2**31 - 1, 2**32 - 1])
            depth_and_colours = chance.choice(
                [(1, 0), (8, 0), (8, 2), (16, 2), (8, 3), (8, 6), (16, 6), (3, 0), (8, 7)]
            )
            head = bytes([*depth_and_colours, 0, 0, chance.choice([0, 0, 1])])
            chunks[0] = b"IHDR", struct.pack(">II", side, chance.choice([side, 1])) + head
        case "bomb":
            side = 9_000  # below what Pillow warns of
            row = bytes(1 + side // 8)
            chunks[0] = b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
            chunks = [chunks[0], (b"IDAT", zlib.compress(row * side, 1)), (b"IEND", b"")]
        case "kind":
            chunks[number] = chance.choice([b"IDAT", b"PLTE", b"tRNS", b"acTL", b"eXIf", b"iCCP"]), data
        case "data":
            chunks[number] = kind, other_bytes(data, chance)
        case "gone":
            del chunks[number]
        case "twice":
            chunks.insert(number, chunks[number])
        case "text":
            chunks.insert(1, (b"zTXt", b"a\0\0" + zlib.compress(bytes(50_000_000), 1)))
        case _:
            chunks.insert(number, (chance.choice([b"eXIf", b"iCCP", b"iTXt", b"gAMA"]), chance.randbytes(40)))
    framed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return content[:8] + b"".join(framed)


def other_tar(content: bytes, chance: random.Random) -> bytes:
    """One member with another name, type, size or content, and a header that fits."""
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        members = [(info, tar.extractfile(info).read()) for info in tar]
    number = chance.randrange(len(members))
    info, data = members[number]
    match chance.choice(["name", "type", "size", "content", "twice", "order", "label"]):
        case "name":
            info.name = chance.choice(["../../x.png", "/etc/passwd", "a" * 300, "", "x", "\x1b[2J.png", "a/../b.cls"])
        case "type":
            info.type = chance.choice([tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, b"Z"])
            info.linkname = chance.choice(["/etc/passwd", "../x", ""])
        case "size":
            info.size = chance.choice([0, 1, 2**33, 2**62])
        case "content":
            data = other_bytes(data, chance)
            info.size = len(data)
        case "twice":
            members.insert(number, members[number])
        case "order":
            members.reverse()
        case _:
            labels = [place for place, (one, _) in enumerate(members) if one.name.endswith(".cls")]
            number = chance.choice(labels)
            info, data = members[number][0], chance.choice([b"-1", b"9" * 400, b"x", b"", b"0.5", b"\xff"])
            info.size = len(data)
    members[number] = info, data
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for info, data in members:
            file.write(info.tobuf() + data + bytes(-len(data) % 512))
            tar.offset = file.tell()
    return file.getvalue()


BY_SUFFIX: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".json": other_json,
    ".jsonl": other_lines,
    ".yaml": other_yaml,
    ".safetensors": other_safetensors,
    ".onnx": other_onnx,
    ".png": other_picture,
    ".tar": other_tar,
}


def harmed(content: bytes, suffix: str, chance: random.Random) -> bytes:
    """The content of a file with one harm: in its bytes, or one that its format allows."""
    if chance.random() < 0.3 or suffix not in BY_SUFFIX:
        return other_bytes(content, chance)
    return BY_SUFFIX[suffix](content, chance)
