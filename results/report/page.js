// Draws the figures when they come into sight, in the colours of the reader's system, and sorts the small tables.
"use strict";
const Report = (() => {
  const coarse = matchMedia("(pointer: coarse)").matches;
  const config = () => ({responsive: true, displayModeBar: coarse || innerWidth < 500 ? false : "hover", displaylogo: false,
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]]});
  const LONG = 100;  // arrays of data hold no colours
  const paint = v => {
    const style = getComputedStyle(document.documentElement);
    const walk = v => typeof v === "string" ? v.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim())
      : Array.isArray(v) ? (v.length > LONG ? v : v.map(walk))
      : v && typeof v === "object" && !ArrayBuffer.isView(v)
        ? Object.fromEntries(Object.entries(v).map(([k, x]) => [k, walk(x)])) : v;
    return walk(v);
  };
  const drawn = new Map();  // element -> how to draw it again
  const redraw = () => drawn.forEach(draw => draw());
  // Long names beside a figure leave no room for it on a phone: they are cut to their level, in two lines.
  const narrow = ({data, layout}) => {
    for (const name of ["xaxis", "yaxis"]) {
      const axis = layout[name];
      if (axis?.type !== "category") continue;
      const names = [...new Set(data.flatMap(trace => trace[name[0]]))];
      const two = text => text.replace(/ \(not .*\)$/, "").replace(": ", "<br>");
      layout[name] = {...axis, tickvals: names, ticktext: names.map(two), tickfont: {size: 9}};
    }
    for (const trace of data) if (trace.type === "heatmap") Object.assign(trace, {showscale: false, textfont: {size: 9}});
  };
  const drawPlot = plot => {
    const figure = paint(JSON.parse(plot.nextElementSibling.textContent));
    if (plot.clientWidth < 500) narrow(figure);
    if (coarse) figure.layout.dragmode = false;  // a finger scrolls the page
    Plotly.react(plot, figure.data, figure.layout, config());
  };
  const start = () => {
    const plots = [...document.querySelectorAll(".plot")];
    const seen = new IntersectionObserver(entries => entries.forEach(({isIntersecting, target}) => {
      if (!isIntersecting || drawn.has(target)) return;
      drawn.set(target, () => drawPlot(target));
      drawPlot(target);
    }), {rootMargin: "400px"});
    plots.forEach(plot => seen.observe(plot));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    addEventListener("afterprint", () => { document.documentElement.classList.remove("print"); redraw(); });
    addEventListener("beforeprint", () => {
      document.documentElement.classList.add("print");  // paper is white
      plots.filter(plot => plot.offsetParent).forEach(plot => drawn.set(plot, () => drawPlot(plot)));
      redraw();
    });
    document.querySelectorAll("table.sortable th button").forEach(button => button.addEventListener("click", () => {
      const head = button.closest("th"), body = head.closest("table").tBodies[0];
      const up = head.getAttribute("aria-sort") !== "ascending";
      head.parentNode.querySelectorAll("th").forEach(th => th.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = row => row.cells[head.cellIndex].dataset.v ?? row.cells[head.cellIndex].textContent;
      const order = (a, b) => a === b ? 0 : a === "" ? 1 : b === "" ? -1
        : (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b) * (up ? 1 : -1);
      body.append(...[...body.rows].sort((a, b) => order(key(a), key(b))));
    }));
  };
  // The page is shown first; then the plotting library, most of the file, is read.
  const load = () => {
    const script = document.createElement("script");
    script.textContent = document.getElementById("plotly").textContent;
    document.head.append(script);
    start();
    document.dispatchEvent(new Event("plotly"));
  };
  requestAnimationFrame(() => setTimeout(load));
  return {paint, config, coarse, drawn};
})();
