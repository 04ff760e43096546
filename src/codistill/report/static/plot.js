// Draws a chart, again after every change, and maps positions to values.

const COLOURS = 7;
const DASHES = 4;
const MARKS = ["M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0", "M-3.6,-3.6h7.2v7.2h-7.2z", "M0,-4.6L4.4,3.4H-4.4z", "M0,-5L5,0L0,5L-5,0z",
  "M0,4.6L4.4,-3.4H-4.4z", "M-1.4,-4.4h2.8v3h3v2.8h-3v3h-2.8v-3h-3v-2.8h3z", "M-4.6,-2h9.2v4h-9.2z"];
const FEW_POINTS = 16; // lines with at most this many points have marks
const LETTER = 8; // pixels, at most
const WHISKERS = 4; // of a line, evenly spaced; those of several lines stand side by side
const CLOSE = 14; // pixels between a pointer and the line that it points at
const MOST_LABELS = 8; // at the ends of lines
const SETTLED = 0.25; // a chart in focus leaves room for what comes after this part of the epochs, not for the first ones

const colourOf = (series) => series.colour % COLOURS;
const dashOf = (series) => (series.dash + Math.floor(series.colour / COLOURS)) % DASHES;
const markOf = (series) => MARKS[colourOf(series)];

function svg(name, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const line = (x1, y1, x2, y2, kind) => svg("line", { x1, y1, x2, y2, class: kind });
const text = (words, x, y, anchor, more = {}) => svg("text", { x, y, "text-anchor": anchor, ...more }, words);
const mark = (shape, [x, y], kind) => svg("path", { class: `mark ${kind}`, d: shape, transform: `translate(${x},${y})` });
const fixed = (point) => point.map((place) => place.toFixed(1)).join(",");

/** The values of x that a chart shows when nothing is zoomed. */
function wholeRange(spec) {
  if (spec.x.labels.length) return [-0.5, spec.x.labels.length - 0.5];
  if (spec.diagonal) return [0, 100];
  const [low, high] = extent(spec.series.flatMap((series) => series.x), false) ?? [0, 1];
  const margin = spec.points ? (high - low) * 0.06 : 0;
  return [low - margin, high + margin];
}

class Plot {
  constructor(spec, shown, range, isLog, isFocused, width) {
    Object.assign(this, { spec, shown, isLog, width, range });
    this.isLines = !spec.points && !spec.diagonal;
    this.height = Math.round(Math.max(230, Math.min(360, width * 0.56)));
    const yRange = this.yRange(isFocused);
    const yTicks = isLog ? logTicks(...yRange) : niceTicks(...yRange, Math.round(this.height / 55));
    this.left = 30 + 7 * Math.max(...yTicks.map((tick) => tickWords(tick).length), 1);
    this.right = width - 10 - this.labelRoom();
    this.top = 10;
    this.bottom = this.height - 44;
    this.x = scale(...range, this.left, this.right, false);
    this.y = scale(...yRange, this.bottom, this.top, isLog);
    this.overlay = svg("g", {});
    this.node = this.draw(yTicks);
  }

  /** The pixels that names at the ends of lines take; 0 where they do not fit. */
  labelRoom() {
    const room = 24 + 6.5 * Math.max(0, ...this.shown.map((series) => series.name.length));
    const [few, lines] = [this.shown.length > 1 && this.shown.length <= MOST_LABELS, this.shown.some((series) => series.x.length > 1)];
    this.hasLabels = this.isLines && lines && few && this.width > 400 && room < this.width * 0.3;
    return this.hasLabels ? room : 0;
  }

  /** The least and the most of what is drawn from one x to another. */
  extent(from, to) {
    return extent(this.shown.flatMap((series) => series.x.flatMap((x, index) => (x < from || x > to ? []
      : [series.y[index], series.low[index] ?? series.y[index], series.high[index] ?? series.y[index]]))), this.isLog);
  }

  yRange(isFocused) {
    if (this.spec.diagonal) return [0, 100];
    const [from, to] = this.range;
    let [low, high] = this.extent(from, to) ?? (this.isLog ? [0.1, 1] : [0, 1]);
    const settled = this.isLines && !this.isLog && this.extent(from + (to - from) * SETTLED, to);
    this.canFocus = Boolean(settled) && settled[1] - settled[0] < (high - low) * 0.6;
    if (this.canFocus && isFocused) {
      this.cut = high > settled[1] ? high : low;
      [low, high] = settled;
    }
    if (this.isLog) return [low / 1.1, high * 1.1];
    const margin = (high - low) * 0.06;
    if (low < 0) return [low - margin, high + margin];
    return [low < high * 0.25 ? 0 : low - margin, high + margin]; // a scale that nearly reaches 0 starts at 0
  }

  draw(yTicks) {
    const { left, right, top, bottom, width, height } = this;
    const clip = `clip-${this.spec.id}`;
    const room = svg("rect", { x: left - 5, y: top - 4, width: Math.max(0, right - left + 10), height: bottom - top + 8 });
    const inside = svg("g", { "clip-path": `url(#${clip})` }, ...this.diagonal(), ...this.shown.map((series) => this.drawSeries(series)));
    return svg("svg", { height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
      svg("defs", {}, svg("clipPath", { id: clip }, room)), ...this.axes(yTicks), inside, ...this.labels(), this.overlay);
  }

  /** The names of lines beside their ends, in the order of these, and what a focus cuts off. */
  labels() {
    const cut = this.cut !== undefined && tickWords(Number(this.cut.toPrecision(3)));
    const words = this.width < NARROW ? `cut: up to ${cut}` : `first epochs: up to ${cut}, cut by “focus”`;
    const first = cut ? [text(words, this.right, this.top + 11, "end", { class: "cut" })] : [];
    if (!this.hasLabels) return first;
    const ends = this.shown.map((series) => [series, series.x.findLastIndex((x, index) => x <= this.range[1] && series.y[index] !== null)])
      .filter(([, last]) => last >= 0).map(([series, last]) => ({ series, y: this.y(series.y[last]) })).sort((a, b) => a.y - b.y);
    ends.forEach((end, index) => { end.y = Math.max(end.y, index ? ends[index - 1].y + 14 : this.top); });
    ends.reverse().forEach((end, index) => { end.y = Math.min(end.y, index ? ends[index - 1].y - 14 : this.bottom); });
    const [from, to] = [this.right + 4, this.right + 18];
    return first.concat(ends.map(({ series, y }) => svg("g", { "data-label": series.name },
      line(from, y, to, y, `line c${colourOf(series)} d${dashOf(series)}`), text(series.name, to + 4, y + 4, "start", { class: "name" }))));
  }

  axes(yTicks) {
    const { left, right, top, bottom, width, height } = this;
    const title = (axis) => (axis.unit ? `${axis.title} (${axis.unit})` : axis.title);
    const middle = (top + bottom) / 2;
    const nodes = yTicks.flatMap((tick) => [line(left, this.y(tick), right, this.y(tick), "grid"),
      text(tickWords(tick), left - 7, this.y(tick) + 4, "end")]);
    for (const [place, words] of this.xTicks()) {
      const x = this.x(place);
      const half = (words.length * LETTER) / 2; // keeps the first and the last label inside
      const centre = Math.max(half, Math.min(x, width - half));
      nodes.push(line(x, bottom, x, bottom + 4, "frame"), text(words, centre, bottom + 18, "middle", { class: "x-tick" }));
    }
    if (!this.isLog && this.y(0) > top && this.y(0) < bottom) nodes.push(line(left, this.y(0), right, this.y(0), "zero"));
    nodes.push(line(left, bottom, right, bottom, "frame"),
      text(title(this.spec.x), (left + right) / 2, height - 6, "middle", { class: "axis-title" }),
      text(title(this.spec.y), 13, middle, "middle", { class: "axis-title", transform: `rotate(-90 13 ${middle})` }));
    return nodes;
  }

  xTicks() {
    const room = this.right - this.left;
    const [low, high] = this.range;
    if (this.spec.x.labels.length) return this.labelTicks(room / (high - low));
    const ticks = niceTicks(low, high, Math.max(2, Math.round(room / 80)));
    return ticks.filter((tick) => !this.isLines || Number.isInteger(tick)).map((tick) => [tick, tickWords(tick)]); // epochs are whole
  }

  /** Names of things: in full where they fit, else without their middle, since ends tell them apart; every second or
      third where they still do not. */
  labelTicks(slot) {
    const { labels } = this.spec.x;
    const fits = Math.max(14, Math.floor(slot / LETTER) - 1);
    const longest = Math.min(fits, Math.max(...labels.map((label) => label.length)));
    const every = Math.max(1, Math.ceil((longest * LETTER + 6) / slot));
    const half = Math.floor((fits - 1) / 2);
    const cut = (label) => (label.length > fits ? `${label.slice(0, half)}…${label.slice(-half)}` : label);
    return labels.map((label, index) => [index, cut(label)])
      .filter(([index]) => index % every === 0 && index >= this.range[0] && index <= this.range[1]);
  }

  diagonal() {
    return this.spec.diagonal ? [line(this.x(0), this.y(0), this.x(100), this.y(100), "diagonal")] : [];
  }

  /** A position on the screen; a series of points steps aside for its neighbours on an axis of things. */
  at(series, index, values = series.y) {
    const slot = this.spec.x.labels.length ? this.x(1) - this.x(0) : 0;
    const order = this.shown.indexOf(series) - (this.shown.length - 1) / 2;
    return [this.x(series.x[index]) + order * Math.min(9, slot / (this.shown.length + 1)), this.y(values[index])];
  }

  drawSeries(series) {
    const kind = `c${colourOf(series)}`;
    const drawable = (value) => value !== null && (!this.isLog || value > 0);
    const indices = series.x.map((_, index) => index).filter((index) => drawable(series.y[index]));
    const points = indices.map((index) => this.at(series, index));
    const nodes = series.low.every(drawable) && series.low.length ? this.drawSpread(series, indices, kind) : [];
    if (!this.spec.points && points.length) {
      nodes.push(svg("path", { class: `line ${kind} d${dashOf(series)}`, d: `M${points.map(fixed).join("L")}` }));
    }
    if (this.spec.points || points.length <= FEW_POINTS) nodes.push(...points.map((point) => mark(markOf(series), point, kind)));
    return svg("g", { "data-series": series.name, class: this.shown.length === 1 ? "lit" : "" }, ...nodes);
  }

  /** Whiskers, on some points of a line and on every other one; a band around a line appears when it is pointed at. */
  drawSpread(series, indices, kind) {
    const edge = (values, from) => from.map((index) => this.at(series, index, values));
    if (!this.isLines) return indices.map((index) => line(...this.at(series, index, series.low), ...this.at(series, index, series.high), `whisker ${kind}`));
    const [from, to] = this.range;
    const far = (place) => (index) => Math.abs(series.x[index] - place);
    const some = Array.from({ length: WHISKERS }, (_, part) => far(from + ((to - from) * (part + 1)) / WHISKERS))
      .map((off) => indices.reduce((best, index) => (off(index) < off(best) ? index : best), indices[0]));
    const [order, count] = [this.shown.indexOf(series), this.shown.length];
    const whiskers = [...new Set(some)].map((index) => {
      const [[middle, low], [, high]] = [this.at(series, index, series.low), this.at(series, index, series.high)];
      const x = Math.min(middle + (order - (count - 1) / 2) * 5, this.right - (count - 1 - order) * 5);
      return line(x, low, x, high, `whisker thin ${kind}`);
    });
    const outline = [...edge(series.high, indices), ...edge(series.low, indices).reverse()].map(fixed).join(" ");
    return [svg("polygon", { class: `band ${kind}`, points: outline }), ...whiskers];
  }

  /** The places a cursor can be at: a value of x with all that is there, or, among scattered points, a single one. */
  stops() {
    const alone = (this.spec.points && !this.spec.x.labels.length) || this.spec.diagonal;
    const stops = new Map();
    for (const series of this.shown) {
      series.x.forEach((x, index) => {
        if (x < this.range[0] || x > this.range[1] || series.y[index] === null) return;
        const key = alone ? `${series.name} ${index}` : x;
        if (!stops.has(key)) stops.set(key, { key, x, alone, items: [] });
        stops.get(key).items.push({ series, index });
      });
    }
    return [...stops.values()].sort((a, b) => a.x - b.x);
  }

  nearest(px, py) {
    const distance = (stop) => {
      const [x, y] = this.at(stop.items[0].series, stop.items[0].index);
      return stop.alone ? Math.hypot(x - px, y - py) : Math.abs(this.x(stop.x) - px);
    };
    return this.stops().reduce((best, stop) => (best === null || distance(stop) < distance(best) ? stop : best), null);
  }

  /** The name of the line at a height, among those of a stop; null if none is close. */
  pointedAt(stop, py) {
    const off = ({ series, index }) => Math.abs(this.at(series, index)[1] - py);
    const [closest] = [...(stop?.items ?? [])].sort((a, b) => off(a) - off(b));
    return closest && off(closest) < CLOSE ? closest.series.name : null;
  }

  /** The value of x under a pixel. */
  valueAt(px) {
    const [low, high] = this.range;
    return low + ((px - this.left) / (this.right - this.left)) * (high - low);
  }

  showCursor(stop) {
    const x = this.x(stop.x);
    this.overlay.replaceChildren(line(x, this.top, x, this.bottom, "cursor"),
      ...stop.items.map(({ series, index }) => [series, this.at(series, index)])
        .filter(([, [, y]]) => y > this.top - 5 && y < this.bottom + 5)
        .map(([series, point]) => mark(MARKS[0], point, `c${colourOf(series)}`)));
  }

  showSelection(from, to) {
    const box = { x: Math.min(from, to), y: this.top, width: Math.abs(to - from), height: this.bottom - this.top };
    this.overlay.replaceChildren(svg("rect", { class: "selection", ...box }));
  }
}
