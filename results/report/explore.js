// The front and the table of recipes: one filter for both. Columns are typed arrays; 20,000 lines take milliseconds.
"use strict";
(() => {
const source = document.getElementById("recipes");
if (!source) return;
const data = JSON.parse(source.textContent);
const KINDS = {float64: Float64Array, float32: Float32Array, uint32: Uint32Array, uint16: Uint16Array, uint8: Uint8Array};
const unpack = ([kind, text]) => {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new KINDS[kind](bytes.buffer);
};
const C = Object.fromEntries(Object.entries(data.columns).map(([name, packed]) => [name, unpack(packed)]));
const filters = data.filters.map(f => ({...f, bits: unpack(f.bits), stride: Math.ceil(data.ids.length / 8)}));
const whole = r => [data.labels[r], ...(data.names[r] ? [] : data.common)].join(", ");  // nothing left out
const texts = data.ids.map((name, r) => `${whole(r)} ${data.names[r]} ${name}`.toLowerCase());
const id = name => document.getElementById(name);
const plot = id("front"), PAGE = 20, MANY = 1000, HEIGHT = 460;
const state = {sort: null, up: true, page: 0, shown: [], front: [], also: [], twins: new Map(), clip: true};

const escape = text => text.replace(/[&<>"]/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})[c]);
// Log ratios as a person reads them, as results/text/ratios.py has it: a change in %, from half and twice on the ratio.
const sign = text => text.replace("-", "\u2212");
const asRatio = gap => Math.abs(gap) >= Math.LN2;
const inUnit = (gap, ratio, unit) => {
  const times = Math.exp(gap);
  if (ratio) {
    const text = !Number.isFinite(times) ? "∞" : times >= 1000 && times < 1e6 ? Math.round(times).toLocaleString("en")
      : times.toPrecision(3);
    return (unit ? "× " : "") + sign(text);
  }
  const percents = 100 * (times - 1), text = percents.toFixed(Math.abs(percents) < 10 ? 2 : 1);
  return sign((percents >= 0 ? "+" : "") + text) + (unit ? " %" : "");
};
const inPoints = () => data.settings[+id("setting").value].points;  // gaps are shares: points of accuracy
const noun = () => inPoints() ? "accuracy" : "loss";
const points = (gap, places) => `${gap > 0 ? "\u2212" : "+"}${(100 * Math.abs(gap)).toFixed(places)}`;
const change = gap => inPoints() ? `${points(gap, Math.abs(gap) < 0.1 ? 2 : 1)} points` : inUnit(gap, asRatio(gap), true);
const changeRange = (gap, low, high) => {
  if (inPoints()) {
    const places = Math.max(Math.abs(low), Math.abs(high)) < 0.1 ? 2 : 1;
    return `${points(high, places)} to ${points(low, places)} points`;
  }
  const ratio = asRatio(gap);
  return `${inUnit(low, ratio, ratio)} to ${inUnit(high, ratio, !ratio)}`;
};
const digits = v => Number.isFinite(v) ? String(+v.toPrecision(4)) : "–";
const gapText = i => C.note[i] === 1 ? `diverged ${C.diverged[i]}/${C.seeds[i] + C.diverged[i] + C.failed[i]}`
  : C.note[i] ? data.notes[C.note[i]] : !Number.isFinite(C.gap[i]) ? "–"
  : change(C.gap[i]) + (Number.isFinite(C.gap_low[i])
    ? ` (${changeRange(C.gap[i], C.gap_low[i], C.gap_high[i])})` : " (1 seed)");
const label = i => data.labels[C.recipe[i]], called = i => data.names[C.recipe[i]] || label(i);
const ratio = v => Number.isFinite(v) ? v.toFixed(2) : "–";
const chance = i => Number.isFinite(C.p_front[i]) ? `${(100 * C.p_front[i]).toFixed(0)} %` : "–";

// --- picking ---------------------------------------------------------------------------------------------------

const chosen = () => {
  const setting = +id("setting").value;
  const asked = filters.flatMap((f, k) => {
    const value = id(`filter-${k}`).value;
    return value === "" ? [] : [{f, value: Math.abs(+value) - 1, want: +value > 0 ? 1 : 0}];
  });
  const words = id("words").value.toLowerCase().split(/\s+/).filter(Boolean);
  const keep = new Uint8Array(data.ids.length);
  for (let r = 0; r < keep.length; r++) {
    keep[r] = asked.every(({f, value, want}) => ((f.bits[value * f.stride + (r >> 3)] >> (r & 7)) & 1) === want)
      && words.every(word => texts[r].includes(word)) ? 1 : 0;
  }
  const out = [];
  for (let i = 0; i < data.count; i++) if (C.setting[i] === setting && keep[C.recipe[i]]) out.push(i);
  return out;
};

// Recipes that trained to the same bits at the same cost are shown once: line -> those that it stands for.
const apart = (lines, cost) => {
  const first = new Map();
  state.twins.clear();
  return lines.filter(i => {
    if (!Number.isFinite(C.gap[i])) return true;
    const key = [C.gap[i], C.gap_low[i], C.gap_high[i], C.val_loss[i], C.lr[i], cost[i]].join();
    const own = first.get(key);
    if (own === undefined) { first.set(key, i); state.twins.set(i, []); return true; }
    state.twins.get(own).push(i);
    return false;
  });
};
const count = lines => lines.reduce((sum, i) => sum + 1 + (state.twins.get(i)?.length ?? 0), 0);
const named = (i, most) => {  // what the labels of its twins have and its own has not
  const twins = state.twins.get(i) ?? [], own = label(i).split(", ");
  const more = twins.slice(0, most).map(t => label(t).split(", ").filter(part => !own.includes(part)).join(", ") || label(t));
  return twins.length ? `the same bits: ${more.join("; ")}${twins.length > most ? `; ${twins.length - most} more` : ""}` : "";
};

// What nothing else beats on both counts; equal points stay together.
const frontOf = (lines, cost) => {
  const {bf16} = data.settings[+id("setting").value], {name} = data.axes[+id("axis").value];
  const beaten = i => name === "overhead" && bf16 !== null && cost[i] >= bf16 && C.gap[i] >= 0;  // by BF16 itself
  const able = lines.filter(i => C.quantizes[i] && Number.isFinite(C.gap[i]) && Number.isFinite(cost[i]) && !beaten(i));
  able.sort((a, b) => cost[a] - cost[b] || C.gap[a] - C.gap[b]);
  const out = [];
  let best = Infinity, at = NaN;
  for (const i of able) {
    if (C.gap[i] < best || (C.gap[i] === best && cost[i] === at)) { out.push(i); best = C.gap[i]; at = cost[i]; }
  }
  return out;
};
// What is beaten at the modelled time, but not with better software, or not with worse.
const alsoFrontOf = (lines, axis, front) => {
  if (axis.name !== "overhead") return [];
  const known = new Set(front), found = [C.overhead_low, C.overhead_high].flatMap(cost => frontOf(lines, cost));
  return [...new Set(found)].filter(i => !known.has(i));
};

// --- drawing ---------------------------------------------------------------------------------------------------

// Above which gaps are clipped, null where nothing is worth it; as results/report/figures.py has it. gaps: sorted.
const usualLimit = (gaps, atLeast) => {
  if (gaps.length < 4) return null;
  const at = q => {
    const place = q * (gaps.length - 1), k = Math.floor(place);
    return gaps[k] + (place - k) * ((gaps[k + 1] ?? gaps[k]) - gaps[k]);
  };
  const fence = Math.max(at(0.75) + 1.5 * (at(0.75) - at(0.25)), atLeast), last = gaps[gaps.length - 1];
  return last - gaps[0] > 2 * (fence - gaps[0]) && fence > gaps[0] ? fence : null;
};
// Round numbers from low to high, evenly apart; and ticks of an axis of log ratios, as results/report/figures.py has it.
const even = (low, high, most) => {
  const least = (high - low) / most, power = 10 ** Math.floor(Math.log10(least) + 1e-9);
  const step = [1, 2, 5, 10].find(m => m * power >= least * (1 - 1e-9)) * power;
  const values = [];
  for (let k = Math.ceil(low / step - 1e-9); k <= high / step + 1e-9; k++) values.push(k * step);
  return {values, step};
};
const ticks = (low, high, most) => {
  if (inPoints()) {
    const {values} = even(100 * low, 100 * high, most);
    return {tickvals: values.map(p => p / 100), ticktext: values.map(p => Math.abs(p) < 1e-9 ? "0" : sign(`${p < 0 ? "+" : ""}${+(-p).toPrecision(6)}`))};
  }
  if (Math.max(Math.abs(low), Math.abs(high)) < Math.LN2) {
    const {values, step} = even(100 * Math.expm1(low), 100 * Math.expm1(high), most);
    const places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    return {tickvals: values.map(p => Math.log1p(p / 100)),
      ticktext: values.map(p => Math.abs(p) < 1e-9 ? "0 %" : sign(`${p > 0 ? "+" : ""}${p.toFixed(places)} %`))};
  }
  if (high - low < 2 * Math.LN2) {
    const values = even(Math.exp(low), Math.exp(high), most).values;
    return {tickvals: values.map(Math.log), ticktext: values.map(v => `× ${+v.toPrecision(6)}`)};
  }
  let step = [Math.LN2, 2 * Math.LN2].find(s => (high - low) / s <= most) ?? Math.LN10 * Math.ceil((high - low) / most / Math.LN10);
  if (step === Math.LN2 && (high - low) / step < 3) step /= 2;
  const values = [];
  for (let k = Math.ceil(low / step - 1e-9); k <= high / step + 1e-9; k++) values.push(k * step);
  return {tickvals: values, ticktext: values.map(v => `× ${+Math.exp(v).toPrecision(3)}`)};
};
const limits = (lines, front, noise) => {
  const gaps = lines.map(i => C.gap[i]).sort((a, b) => a - b);
  if (!gaps.length) return [0, 0.1];
  const lows = front.map(i => C.gap_low[i]).filter(Number.isFinite), highs = front.map(i => C.gap_high[i]).filter(Number.isFinite);
  let low = Math.min(gaps[0], ...lows), high = Math.max(gaps[gaps.length - 1], ...highs);
  const fence = usualLimit(gaps, Math.max(...front.map(i => C.gap[i]), ...highs));
  id("clip").hidden = fence === null;
  id("clip").textContent = state.clip ? "show all to scale" : "clip what is far above";
  if (fence !== null && state.clip) high = fence;
  const span = Math.max(high - low, 1e-3);
  low -= 0.05 * span;
  if (low > 0 && low < span) low = -0.02 * high;  // BF16 itself, where that does not squeeze the recipes
  if (noise !== null && low <= 0) low = Math.min(low, Math.max(-noise, -0.3 * span));
  return [low, Math.max(high, low + span)];
};

// Where costs are shared, marks step aside; where there are many, each place has one. Returns what is drawn, and where.
// thin: leave out what has no place; wide: how many places each takes.
const place = (lines, cost, ys, axis, range, low, span, taken, thin, wide = 1) => {
  const size = thin ? 15 : 9;
  const width = Math.max(plot.clientWidth - 80, 200), out = [];
  const rows = y => Math.round((y - low) / span * (HEIGHT - 90) / size), room = axis.discrete ? Math.round(63 / size) : 0;
  for (let k = 0; k < lines.length; k++) {
    const x = cost[lines[k]], row = rows(ys[k]);
    const column = axis.discrete ? x : Math.round((x - range[0]) / (range[1] - range[0]) * width / size);
    let put = false;
    for (let step = 0; step <= 2 * room && !put; step++) {
      const aside = wide * (step + 1 >> 1) * (step % 2 ? 1 : -1), keys = [];
      for (let a = 1 - wide; a < wide; a++) for (let b = 1 - wide; b < wide; b++) {
        keys.push(axis.discrete ? `${column} ${row + b} ${aside + a}` : `${column + a} ${row + b}`);
      }
      if (taken.has(keys[keys.length >> 1])) continue;
      keys.forEach(key => taken.add(key));
      out.push({i: lines[k], x: x + 0.0055 * size * aside * axis.pitch, y: ys[k]});
      put = true;
    }
    if (!put && !thin) out.push({i: lines[k], x, y: ys[k]});
  }
  return out;
};

const soon = i => Number.isFinite(C.time_to_quality[i]) ? ratio(C.time_to_quality[i])
  : Number.isNaN(C.time_to_quality[i]) ? "–" : "not with 4 × its tokens";
// Below this line a recipe is at BF16's loss sooner than BF16: its gap is worth less than the time that it saves.
const breakEven = (slope, range, bottom, top) => {
  const at = gap => Math.exp(-gap / slope), points = [];
  const from = Math.max(range[0], at(top)), to = Math.min(range[1], at(bottom));
  for (let k = 0; from < to && k <= 60; k++) points.push(from + (to - from) * k / 60);
  return {type: "scatter", mode: "lines", name: "below: BF16's loss in less than BF16's time", hoverinfo: "skip",
    x: points, y: points.map(x => -slope * Math.log(x)), line: {width: 1.5, dash: "dash", color: "var(--fg)"}};
};
const hover = i => {
  const name = data.names[C.recipe[i]], metric = data.settings[C.setting[i]].metric;
  const lines = text => escape(text).replace(/(.{30,45}?)[ ,]/g, "$1<br>");
  const words = whole(C.recipe[i]);
  return `<b>${lines(name || words)}</b>${name && !name.endsWith(words) ? `<br>${lines(words)}` : ""}<br>${noun()} against BF16: ${gapText(i)}`
    + data.axes.map(a => `<br>${escape(a.title)}: ${digits(C[a.name][i])}`).join("")
    + (Number.isNaN(C.time_to_quality[i]) ? "" : `<br>time to BF16's loss, BF16 = 1: ${soon(i)}`)
    + (metric && Number.isFinite(C.val_metric[i]) ? `<br>${escape(metric)} ${digits(C.val_metric[i])}` : "")
    + `<br>loss ${digits(C.val_loss[i])}, lr ${digits(C.lr[i])}, ${C.seeds[i]} seeds<br>chance of the front ${chance(i)}`
    + (state.twins.get(i)?.length ? `<br>${state.twins.get(i).length} more of the same bits` : "")
    + `<br>${data.ids[C.recipe[i]]}`;
};
const marks = (points, name, symbol, colour, size) => ({type: "scatter", mode: "markers", name, hoverinfo: "text",
  x: points.map(p => p.x), y: points.map(p => p.y), hovertext: points.map(p => hover(p.i)), customdata: points.map(p => p.i),
  marker: {symbol, size, color: colour, line: {width: 1.5, color: colour}}});
const bars = (points, colour) => ({type: "data", color: colour, thickness: 1.2, width: 4, visible: true,
  symmetric: false, array: points.map(p => C.gap_high[p.i] - C.gap[p.i] || 0),
  arrayminus: points.map(p => C.gap[p.i] - C.gap_low[p.i] || 0)});

// Names of the front's members: below and to the left of the front there is nothing else, so they stand there, where
// they neither lie on a disc nor on each other, after the numbers of their discs; one that has no place is left out, its
// number stands in the table.
const SIZE = 12, MOST_NAMES = 10;
const nameplates = (steps, range, bottom, top) => {
  const width = Math.max(plot.clientWidth - 90, 200), height = HEIGHT - 95;
  const px = x => (x - range[0]) / (range[1] - range[0]) * width, py = y => (top - y) / (top - bottom) * height;
  const boxes = steps.map(p => [px(p.x) - 11, py(p.y) - 11, px(p.x) + 11, py(p.y) + 11]), out = [];
  const free = box => box[0] >= -6 && box[2] <= width + 4 && box[1] >= 0 && box[3] <= height
    && boxes.every(o => box[0] >= o[2] || box[2] <= o[0] || box[1] >= o[3] || box[3] <= o[1]);
  for (const p of steps.slice(0, MOST_NAMES)) {
    const words = called(p.i).split(", "), few = words.length > 2 ? `${words.slice(0, 2).join(", ")} …` : words.join(", ");
    const text = `${p.number}: ${few}`;
    const wide = 6.6 * text.length + 8, x = px(p.x), y = py(p.y);
    const tries = [["right", -13, 12], ["left", 13, 12], ["right", -13, 30], ["left", 13, 30], ["right", -13, 48],
      ["left", 13, -14], ["right", -13, -14], ["left", 13, 48]];
    for (const [anchor, dx, dy] of tries) {
      const left = anchor === "right" ? x + dx - wide : x + dx, box = [left, y + dy - 9, left + wide, y + dy + 9];
      if (!free(box)) continue;
      boxes.push(box);
      out.push({text: escape(text), x: p.x, y: p.y, xanchor: anchor, yanchor: "middle", xshift: dx, yshift: -dy,
        showarrow: false, font: {size: SIZE, color: "var(--fg)"}, bgcolor: "var(--veil)", borderpad: 1});
      break;
    }
  }
  return out;
};

const figure = () => {
  const axis = data.axes[+id("axis").value], cost = C[axis.name], {noise, slope} = data.settings[+id("setting").value];
  const able = state.shown.filter(i => C.quantizes[i] && Number.isFinite(cost[i]));
  const finite = able.filter(i => Number.isFinite(C.gap[i])), front = state.front, onFront = new Set([...front, ...state.also]);
  let [low, high] = limits(finite, front, noise);
  if (finite.length) low -= 0.12 * (high - low);  // room for names below the front
  const span = high - low;
  const costs = able.map(i => cost[i]), least = costs.reduce((a, b) => Math.min(a, b), Infinity);
  const most = costs.reduce((a, b) => Math.max(a, b), -Infinity);
  axis.pitch = axis.discrete ? pitch(costs) : 0;
  const edge = axis.discrete ? axis.pitch / 2 : 0.03 * (most - least) || 0.05 * Math.abs(most) || 0.5;
  const range = Number.isFinite(least) ? [least - edge, most + edge] : [0, 1];
  const taken = new Set(), thin = finite.length > MANY;
  const put = (lines, y, wide) => place(lines, cost, lines.map(y), axis, range, low, span, taken, thin, wide);
  const steps = axis.discrete ? put(front, i => C.gap[i], 2) : front.map(i => ({i, x: cost[i], y: C.gap[i]}));
  const numbers = steps.map((_, n) => String(n + 1));
  for (let n = steps.length - 1; n > 0; n--) {  // equal ones share a disc
    if (steps[n].x !== steps[n - 1].x || steps[n].y !== steps[n - 1].y) continue;
    numbers[n - 1] += `, ${numbers[n]}`;
    numbers[n] = "";
  }
  const also = put(state.also.filter(i => C.gap[i] <= high), i => C.gap[i]);
  const rest = finite.filter(i => !onFront.has(i)).sort((a, b) => C.gap[a] - C.gap[b]);
  const others = put(rest.filter(i => C.gap[i] <= high), i => C.gap[i]);
  const far = put(rest.filter(i => C.gap[i] > high), () => high + 0.04 * span);
  const blown = put(able.filter(i => C.note[i] === 1), () => high + 0.09 * span);
  const few = others.length <= 60;
  const asSoon = axis.name === "overhead" && slope !== null ? [breakEven(slope, range, low, high)] : [];
  const traces = [
    ...asSoon,
    {...marks(others, "other recipe", "diamond-open", "var(--muted)", 8), ...(few ? {error_y: bars(others, "var(--muted)")} : {})},
    marks(far, `${far.length} far above, not to scale`, "triangle-up-open", "var(--muted)", 9),
    marks(blown, "diverged", "x-thin-open", "var(--bad)", 9),
    {...marks(also, "front with better or worse software", "circle-open", "var(--accent)", 13), error_y: bars(also, "var(--accent)")},
    {...marks(steps, "front: nothing is better and cheaper", "circle", "var(--accent)", 20), mode: "lines+markers+text",
      line: {shape: "hv", width: 1.5, dash: "dot", color: "var(--accent)"}, text: numbers,
      textfont: {color: "var(--bg)", size: numbers.map(text => text.length > 2 ? 8 : 11)}, error_y: bars(steps, "var(--accent)")},
  ].filter(t => t.x.length);
  const font = {family: "system-ui, sans-serif", size: 13, color: "var(--fg)"};
  const line = {gridcolor: "var(--line)", linecolor: "var(--line)", zeroline: false, automargin: true};
  const shapes = [{type: "line", xref: "paper", x0: 0, x1: 1, y0: 0, y1: 0, line: {color: "var(--fg)"}}];
  if (noise !== null) shapes.unshift({type: "rect", xref: "paper", x0: 0, x1: 1, layer: "below", y0: -noise,
    y1: noise, fillcolor: "var(--band)", line: {width: 0}});
  const base = low > 0 ? "BF16 lies below this edge" : noise !== null ? "BF16 (band: noise floor)" : "BF16";
  const top = high + 0.13 * span, {tickvals, ticktext} = ticks(low, high, 6);
  const nothing = finite.length ? [] : [{text: able.length && blown.length === able.length ? "Every recipe diverged"
    : "No recipe has both a gap and a cost", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5,
    font: {size: 16, color: "var(--muted)"}}];
  const layout = {font, height: HEIGHT, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
    margin: {l: 8, r: 8, t: 8, b: 8}, shapes, uirevision: axis.name,
    hoverlabel: {bgcolor: "var(--bg)", bordercolor: "var(--muted)", font, align: "left"},
    modebar: {bgcolor: "rgba(0,0,0,0)", color: "var(--muted)", activecolor: "var(--accent)"},
    xaxis: {...line, title: {text: `${axis.title} (← cheaper)`, font: {size: 13}}, range, ...(axis.name === "points" ? {dtick: 1} : {})},
    yaxis: {...line, title: {text: `${noun()} against BF16 (↓ better)`, font: {size: 13}}, range: [low, top], tickvals, ticktext},
    annotations: [...nothing, ...nameplates(steps.map((p, n) => ({...p, number: numbers[n]})).filter(p => p.number), range, low, top), {text: base,
      showarrow: false, xref: "paper", x: 1, xanchor: "right", y: Math.max(0, low), yanchor: "bottom",
      font: {color: "var(--muted)", size: 12}}],
    legend: {orientation: "h", y: -0.16, yanchor: "top", font: {size: 12}, traceorder: "reversed"}};
  if (Report.coarse) layout.dragmode = false;
  const hidden = rest.length - others.length - far.length;
  const all = count(state.shown);
  const parts = [`${all.toLocaleString("en")} ${all === 1 ? "recipe" : "recipes"} shown, `
    + (front.length ? `${count(front)} on their front`
      + (state.also.length ? `, ${count(state.also)} more with better or worse software.` : ".") : finite.length ? "none on their front: BF16 is as cheap and as good." : "none with both a gap and a cost, so there is no front.")];
  if (all > state.shown.length) {
    parts.push(`Those that trained to the same bits at the same cost are one: ${state.shown.length.toLocaleString("en")} are left.`);
  }
  if (far.length) parts.push(`${far.length.toLocaleString("en")} far above are at the upper edge, not to scale.`);
  if (hidden) parts.push(`${hidden.toLocaleString("en")} lie under the mark of another and are not drawn; the table has them.`);
  const lost = state.shown.length - able.length;
  if (lost) parts.push(`${lost} do not quantize or have no ${axis.title}.`);
  id("front-says").textContent = parts.join(" ");
  return {traces, layout};
};
const pitch = costs => {
  const values = [...new Set(costs)].sort((a, b) => a - b);
  return values.slice(1).reduce((least, v, k) => Math.min(least, v - values[k]), values.length > 1 ? Infinity : 1);
};
const draw = () => {
  const {traces, layout} = Report.paint(figure());
  return Plotly.react(plot, traces, layout, Report.config()).then(ticksOfView);
};
// The reader's zoom stays through a redraw, so the ticks are those of what is seen.
const ticksOfView = () => {
  const {range, tickvals} = plot.layout.yaxis, seen = ticks(Math.min(...range), Math.max(...range), 6);
  if (String(seen.tickvals) === String(tickvals)) return null;
  return Plotly.relayout(plot, {"yaxis.tickvals": seen.tickvals, "yaxis.ticktext": seen.ticktext});
};

// --- table -----------------------------------------------------------------------------------------------------

const columns = () => {
  const axis = data.axes[+id("axis").value], {metric, rises} = data.settings[+id("setting").value];
  const place = new Map(state.front.map((i, n) => [i, n + 1])), also = new Set(state.also);
  const of = (title, kind, key, html, best = "low") => ({title, kind, key, html: html ?? (i => digits(key(i))), best});
  return [
    of("front", "", i => place.get(i) ?? (also.has(i) ? place.size + 1 : NaN),
      i => place.has(i) ? `<span class="mark">${place.get(i)}</span>` : also.has(i) ? "○" : ""),
    of("recipe", "label", called, i => `<span title="${escape(whole(C.recipe[i]))}">${escape(called(i))}</span>`
      + (named(i, 3) && ` <span class="muted">(${escape(named(i, 3))})</span>`)),
    of(`${noun()} against BF16`, "n", i => C.gap[i], gapText),
    ...(C.gap_bf16.some(Number.isFinite) ? [of("the same, both in BF16", "n", i => C.gap_bf16[i],
      i => Number.isFinite(C.gap_bf16[i]) ? change(C.gap_bf16[i]) : "–")] : []),
    of("chance of the front", "n", i => C.p_front[i], chance, "high"),
    ...data.axes.map(a => of(a.name.replaceAll("_", " "), "n", i => C[a.name][i], a.name === "overhead" ? i => ratio(C.overhead[i]) : null)),
    ...(C.time_to_quality.some(Number.isFinite) ? [of("time to BF16's loss", "n", i => C.time_to_quality[i], soon)] : []),
    ...(C.rollout_overhead.some(Number.isFinite) ? [of("rollout overhead", "n", i => C.rollout_overhead[i],
      i => ratio(C.rollout_overhead[i]))] : []),
    ...(metric ? [of(metric, "n", i => C.val_metric[i], null, rises ? "high" : "low")] : []),
    of("val loss ↓", "n", i => C.val_loss[i]), of("lr", "n", i => C.lr[i]), of("seeds", "n", i => C.seeds[i]),
  ];
};
const table = () => {
  const all = columns(), head = id("recipes-table").tHead, body = id("recipes-table").tBodies[0];
  let lines = state.shown.slice();
  const place = new Map([...state.front, ...state.also].map((i, n) => [i, n]));
  const by = state.sort === null ? null : all[state.sort];
  const gap = i => Number.isNaN(C.gap[i]) ? Infinity : C.gap[i];
  const order = (a, b) => {
    if (!by) return (place.get(a) ?? Infinity) - (place.get(b) ?? Infinity) || gap(a) - gap(b) || 0;
    const p = by.key(a), q = by.key(b);
    if (typeof p === "string") return (state.up ? 1 : -1) * (p < q ? -1 : p > q ? 1 : 0);
    const lacks = Number.isNaN(p) - Number.isNaN(q);  // what has no value comes last either way
    return lacks || (p === q ? 0 : (state.up ? 1 : -1) * (p - q));
  };
  lines.sort(order);
  const pages = Math.max(Math.ceil(lines.length / PAGE), 1);
  state.page = Math.min(state.page, pages - 1);
  const sorted = k => state.sort === k ? ` aria-sort="${state.up ? "ascending" : "descending"}"` : "";
  head.innerHTML = `<tr>${all.map((c, k) => `<th class="${c.kind}"${sorted(k)}><button type="button" data-k="${k}">`
    + `${escape(c.title).replace(/ (?=[↑↓]$)/, "\u00a0")}</button></th>`).join("")}</tr>`;
  body.innerHTML = lines.slice(PAGE * state.page, PAGE * (state.page + 1)).map(i =>
    `<tr class="${place.has(i) ? "front" : ""}">${all.map(c => `<td class="${c.kind}">${c.html(i)}</td>`).join("")}</tr>`).join("");
  const many = count(lines), room = many > lines.length ? ` in ${lines.length.toLocaleString("en")} lines` : "";
  id("page-says").textContent = `${many.toLocaleString("en")} recipes${room}, page ${state.page + 1} of ${pages}`;
  id("previous").disabled = state.page === 0;
  id("next").disabled = state.page === pages - 1;
};

// --- acting ----------------------------------------------------------------------------------------------------

let ready = false;
const update = () => {
  const begin = performance.now();
  const axis = data.axes[+id("axis").value], cost = C[axis.name];
  state.shown = apart(chosen(), cost);
  state.front = frontOf(state.shown, cost);
  state.also = alsoFrontOf(state.shown, axis, state.front);
  table();
  document.querySelectorAll(".of").forEach(part => { part.hidden = part.dataset.setting !== id("setting").value; });
  const done = () => { document.body.dataset.took = (performance.now() - begin).toFixed(1); };
  if (ready) draw().then(done); else done();
};
id("filters").innerHTML = filters.map((f, k) => `<select id="filter-${k}" aria-label="${escape(f.title)}" title="${escape(f.title)}">`
  + `<option value="">${escape(f.title)}: any</option>`
  + `<optgroup label="with">${f.values.map((v, n) => `<option value="${n + 1}">${escape(v)}</option>`).join("")}</optgroup>`
  + `<optgroup label="without">${f.values.map((v, n) => `<option value="${-n - 1}">no ${escape(v)}</option>`).join("")}</optgroup>`
  + "</select>").join("");
const again = () => { state.page = 0; update(); };
id("controls").addEventListener("change", again);
id("words").addEventListener("input", again);
id("controls").addEventListener("submit", event => event.preventDefault());
id("controls").addEventListener("reset", () => setTimeout(() => { state.sort = null; again(); }));
id("clip").addEventListener("click", () => { state.clip = !state.clip; update(); });
if (data.common.length) id("common").textContent = `All recipes have: ${data.common.join(", ")}.`;
id("previous").addEventListener("click", () => { state.page--; table(); });
id("next").addEventListener("click", () => { state.page++; table(); });
id("recipes-table").tHead.addEventListener("click", event => {
  const button = event.target.closest("button");
  if (!button) return;
  const k = +button.dataset.k;
  state.up = state.sort === k ? !state.up : columns()[k].best === "low";  // the best first
  state.sort = k;
  table();
});
document.addEventListener("plotly", () => {
  ready = true;
  Report.drawn.set(plot, draw);
  draw().then(() => {
    plot.on("plotly_relayout", ticksOfView);
    document.body.dataset.drawn = performance.now().toFixed(0);
  });
});
update();
})();
