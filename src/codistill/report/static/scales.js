"use strict";
// Pure functions from numbers to positions and labels.

/** Round numbers between two ends, about `count` of them. */
function niceTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) {
    ticks.push(Number(tick.toPrecision(12)));
  }
  return ticks;
}

/** Powers of ten, with 2 and 5 between them where few powers fit. */
function logTicks(low, high) {
  const ticks = [];
  const factors = Math.log10(high / low) > 3 ? [1] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    ticks.push(...factors.map((factor) => Number((factor * 10 ** power).toPrecision(12))));
  }
  return ticks.filter((tick) => tick >= low && tick <= high);
}

/** A function from values to pixels. */
function scale(low, high, from, to, isLog) {
  const f = isLog ? Math.log10 : (value) => value;
  const span = f(high) - f(low) || 1;
  return (value) => from + ((f(value) - f(low)) / span) * (to - from);
}

/** The least and the most of some numbers, a little apart; null where there are none. */
function extent(values, isLog) {
  const there = values.filter((value) => Number.isFinite(value) && (!isLog || value > 0));
  if (!there.length) return null;
  let [low, high] = [Infinity, -Infinity];
  for (const value of there) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low < high) return [low, high];
  return isLog ? [low / 2, high * 2] : [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(high) * 0.1 || 1)];
}

/** As the page's tables write numbers. */
function inWords(value) {
  const size = Math.abs(value);
  if (size >= 10000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return size >= 0.1 ? value.toFixed(2) : String(Number(value.toPrecision(2)));
}

/** Short, for axes. */
function tickWords(value) {
  if (Math.abs(value) >= 10000) return value.toLocaleString("en", { notation: "compact" });
  return String(Number(value.toPrecision(6)));
}

function csvOf(spec) {
  const quote = (text) => `"${String(text).replaceAll('"', '""')}"`;
  const lines = [["series", spec.x.title, spec.y.title, "least", "most", "n"].map(quote).join(",")];
  for (const one of spec.series) {
    one.x.forEach((x, index) => {
      const place = spec.x.labels.length ? quote(spec.x.labels[x]) : x;
      const rest = [one.y, one.low, one.high, one.n].map((values) => values[index] ?? "");
      lines.push([quote(one.name), place, ...rest].join(","));
    });
  }
  return lines.join("\n") + "\n";
}
