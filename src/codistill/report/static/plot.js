// Draws a chart, again after every change, and maps positions to values.

const COLOURS = 7;
const DASHES = 4;
const MARKS = ["M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0", "M-3.6,-3.6h7.2v7.2h-7.2z", "M0,-4.6L4.4,3.4H-4.4z", "M0,-5L5,0L0,5L-5,0z",
  "M0,4.6L4.4,-3.4H-4.4z", "M-1.4,-4.4h2.8v3h3v2.8h-3v3h-2.8v-3h-3v-2.8h3z", "M-4.6,-2h9.2v4h-9.2z"];
const FEW_POINTS = 16; // lines with at most this many points have marks
const LETTER = 8; // pixels, at most

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
  constructor(spec, shown, range, isLog, width) {
    Object.assign(this, { spec, shown, isLog, width, range });
    this.height = Math.round(Math.max(230, Math.min(360, width * 0.56)));
    const yRange = this.yRange();
    const yTicks = isLog ? logTicks(...yRange) : niceTicks(...yRange, Math.round(this.height / 55));
    this.left = 30 + 7 * Math.max(...yTicks.map((tick) => tickWords(tick).length), 1);
    this.right = width - 10;
    this.top = 10;
    this.bottom = this.height - 44;
    this.x = scale(...range, this.left, this.right, false);
    this.y = scale(...yRange, this.bottom, this.top, isLog);
    this.overlay = svg("g", {});
    this.node = this.draw(yTicks);
  }

  yRange() {
    if (this.spec.diagonal) return [0, 100];
    const [from, to] = this.range;
    const values = this.shown.flatMap((series) => series.x.flatMap((x, index) => (x < from || x > to ? []
      : [series.y[index], series.low[index] ?? series.y[index], series.high[index] ?? series.y[index]])));
    const [low, high] = extent(values, this.isLog) ?? (this.isLog ? [0.1, 1] : [0, 1]);
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
      svg("defs", {}, svg("clipPath", { id: clip }, room)), ...this.axes(yTicks), inside, this.overlay);
  }

  axes(yTicks) {
    const { left, right, top, bottom, width, height } = this;
    const text = (words, x, y, anchor, more = {}) => svg("text", { x, y, "text-anchor": anchor, ...more }, words);
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
    const whole = !this.spec.points && !this.spec.diagonal; // epochs are whole numbers
    return ticks.filter((tick) => !whole || Number.isInteger(tick)).map((tick) => [tick, tickWords(tick)]);
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
    return svg("g", { "data-series": series.name }, ...nodes);
  }

  /** A band around a line, whiskers on points. */
  drawSpread(series, indices, kind) {
    const edge = (values) => indices.map((index) => this.at(series, index, values));
    if (!this.spec.points) {
      return [svg("polygon", { class: `band ${kind}`, points: [...edge(series.high), ...edge(series.low).reverse()].map(fixed).join(" ") })];
    }
    const [low, high] = [edge(series.low), edge(series.high)];
    return indices.map((_, place) => line(...low[place], ...high[place], `whisker ${kind}`));
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

  /** The value of x under a pixel. */
  valueAt(px) {
    const [low, high] = this.range;
    return low + ((px - this.left) / (this.right - this.left)) * (high - low);
  }

  showCursor(stop) {
    const x = this.x(stop.x);
    this.overlay.replaceChildren(line(x, this.top, x, this.bottom, "cursor"),
      ...stop.items.map(({ series, index }) => mark(MARKS[0], this.at(series, index), `c${colourOf(series)}`)));
  }

  showSelection(from, to) {
    const box = { x: Math.min(from, to), y: this.top, width: Math.abs(to - from), height: this.bottom - this.top };
    this.overlay.replaceChildren(svg("rect", { class: "selection", ...box }));
  }
}
