"use strict";
// Draws the charts of the page's data, in the colours of its style; again if the window or its colours change.
(() => {
  const { charts } = JSON.parse(document.getElementById("data").textContent);
  const place = document.getElementById("charts");
  const DASHES = [[], [7, 4], [2, 3]];
  const HEIGHT = 230;
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = (value) => (value == null ? "–" : value.toLocaleString("en", { maximumSignificantDigits: 5 }));
  const drawn = new Map();

  function describe(chart) {
    const told = chart.lines.map(({ label, values }) => `${label} from ${number(values[0])} to ${number(values.at(-1))}`);
    return `${chart.title}${chart.unit ? `, in ${chart.unit}` : ""}. ${chart.about}. ${told.join("; ")}.`;
  }

  function draw(chart, figure) {
    drawn.get(figure)?.destroy();
    const ink = colour("--ink"), faint = colour("--faint");
    const axis = { stroke: ink, grid: { stroke: faint, width: 1 }, ticks: { stroke: faint, width: 1 } };
    const lines = chart.lines.map((line) => ({
      label: line.label,
      stroke: colour(`--run-${line.run % 6}`),
      width: 1.75,
      dash: DASHES[line.style % DASHES.length],
      points: { show: line.steps.length < 40, size: 5 },
      spanGaps: true,
      value: (_, value) => number(value),
    }));
    const plot = new uPlot(
      {
        width: Math.max(figure.clientWidth, 200),
        height: HEIGHT,
        scales: { x: { time: false }, y: chart.top === null ? {} : { range: [0, chart.top] } },
        series: [{ label: "step", value: (_, value) => number(value) }, ...lines],
        axes: [
          { ...axis, values: (_, ticks) => ticks.map(number) },
          { ...axis, size: 70, values: (_, ticks) => ticks.map(number) },
        ],
        cursor: { drag: { x: true, y: false } },
      },
      uPlot.join(chart.lines.map((line) => [line.steps, line.values])),
      figure,
    );
    plot.root.querySelectorAll(".u-legend .u-series").forEach((row, index) => {
      if (index === 0) return;
      const label = row.querySelector("th");
      label.tabIndex = 0;
      label.setAttribute("role", "button");
      label.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        event.stopPropagation();
        plot.setSeries(index, { show: !plot.series[index].show });
      });
    });
    drawn.set(figure, plot);
  }

  function steer(figure, event) {
    const plot = drawn.get(figure);
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -25, PageDown: 25 }[event.key];
    if (event.key === "Escape") plot.setData(plot.data);
    if (move === undefined) return;
    event.preventDefault();
    const steps = plot.data[0];
    const at = Math.min(Math.max((plot.cursor.idx ?? (move > 0 ? -1 : steps.length)) + move, 0), steps.length - 1);
    plot.setCursor({ left: plot.valToPos(steps[at], "x"), top: HEIGHT / 3 });
  }

  for (const chart of charts) {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    caption.textContent = chart.unit ? `${chart.title} (${chart.unit})` : chart.title;
    if (chart.top !== null) caption.append(`, some peaks above ${number(chart.top)} are cut off`);
    figure.append(caption);
    figure.tabIndex = 0;
    figure.setAttribute("aria-label", describe(chart));
    figure.title = chart.about;
    figure.addEventListener("keydown", (event) => steer(figure, event));
    place.append(figure);
    draw(chart, figure);
    let width = figure.clientWidth;
    new ResizeObserver(() => {
      if (figure.clientWidth === width) return;
      width = figure.clientWidth;
      drawn.get(figure).setSize({ width: Math.max(width, 200), height: HEIGHT });
    }).observe(figure);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    charts.forEach((chart, index) => draw(chart, place.children[index]));
  });
  document.body.dataset.charts = String(charts.length);
})();
