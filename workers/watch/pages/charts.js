"use strict";
// Draws the charts of the page's data, in the colours of its style; again if the window or its colours change.
const hytrain = (() => {
  const { charts } = JSON.parse(document.getElementById("data").textContent);
  const place = document.getElementById("charts");
  const DASHES = [[], [7, 4], [2, 3]];
  const HEIGHT = 230, MOST_POINTS = 4000;
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = (value) => (value == null ? "–" : value.toLocaleString("en", { maximumSignificantDigits: 5 }));
  const says = (line) => line.values.some((value) => value !== 0); // a line of zeros says nothing
  // Copies: uPlot may keep the arrays that it is given, and what it has drawn is to stay as it is while lines grow.
  const joined = (chart) => uPlot.join(chart.lines.map((line) => [[...line.steps], [...line.values]]));

  function describe(chart) {
    const told = chart.lines.map(({ label, values }) => `${label} from ${number(values[0])} to ${number(values.at(-1))}`);
    return `${chart.title}${chart.unit ? `, in ${chart.unit}` : ""}. ${chart.about}. ${told.join("; ")}.`;
  }

  function draw(chart) {
    chart.plot?.destroy();
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
    const plot = (chart.plot = new uPlot(
      {
        width: Math.max(chart.figure.clientWidth, 200),
        height: HEIGHT,
        scales: { x: { time: false }, y: chart.top === null ? {} : { range: [0, chart.top] } },
        series: [{ label: "step", value: (_, value) => number(value) }, ...lines],
        axes: [
          { ...axis, values: (_, ticks) => ticks.map(number) },
          { ...axis, size: 70, values: (_, ticks) => ticks.map(number) },
        ],
        cursor: { drag: { x: true, y: false } },
      },
      joined(chart),
      chart.figure,
    ));
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
  }

  function steer(plot, event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -25, PageDown: 25 }[event.key];
    if (event.key === "Escape") plot.setData(plot.data);
    if (move === undefined) return;
    event.preventDefault();
    const steps = plot.data[0];
    const at = Math.min(Math.max((plot.cursor.idx ?? (move > 0 ? -1 : steps.length)) + move, 0), steps.length - 1);
    plot.setCursor({ left: plot.valToPos(steps[at], "x"), top: HEIGHT / 3 });
  }

  function begin(chart) {
    const figure = (chart.figure = document.createElement("figure")), caption = document.createElement("figcaption");
    caption.textContent = chart.unit ? `${chart.title} (${chart.unit})` : chart.title;
    if (chart.top !== null) caption.append(`, some peaks above ${number(chart.top)} are cut off`);
    figure.append(caption);
    figure.tabIndex = 0;
    figure.setAttribute("aria-label", describe(chart));
    figure.title = chart.about;
    figure.addEventListener("keydown", (event) => steer(chart.plot, event));
    const next = charts.slice(charts.indexOf(chart) + 1).find((other) => other.figure);
    place.insertBefore(figure, next ? next.figure : null);
    draw(chart);
    let width = figure.clientWidth;
    new ResizeObserver(() => {
      if (figure.clientWidth === width) return;
      width = figure.clientWidth;
      chart.plot.setSize({ width: Math.max(width, 200), height: HEIGHT });
    }).observe(figure);
    document.body.dataset.charts = String(charts.filter((other) => other.figure).length);
  }

  function extend(line, step, value) {
    while (line.steps.length && line.steps.at(-1) >= step) line.steps.pop(), line.values.pop(); // the loop went back
    if (line.steps.length >= MOST_POINTS) {
      line.steps = line.steps.filter((_, index) => index % 2);
      line.values = line.values.filter((_, index) => index % 2);
    }
    line.steps.push(step);
    line.values.push(value);
  }

  // A live run's next record; `show` draws it.
  function add(record, run) {
    for (const chart of charts) {
      for (const line of chart.lines) {
        const value = record[line.metric];
        if (line.run !== run || typeof value !== "number") continue;
        extend(line, record.step, value * chart.factor);
        chart.grows = true;
      }
    }
  }

  // Draws what was added, once for all of it: uPlot's scales follow its data only after this script is done.
  function show() {
    for (const chart of charts) {
      if (!chart.grows || !chart.lines.some(says)) continue;
      chart.grows = false;
      if (!chart.figure) {
        begin(chart);
        continue;
      }
      const { min, max } = chart.plot.scales.x, steps = chart.plot.data[0];
      const isZoomed = min > steps[0] || max < steps.at(-1);
      chart.plot.setData(joined(chart), !isZoomed);
      chart.figure.setAttribute("aria-label", describe(chart));
    }
  }

  document.body.dataset.charts = "0";
  charts.filter((chart) => chart.lines.some(says)).forEach(begin);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    charts.filter((chart) => chart.figure).forEach(draw);
  });
  return { charts, add, show };
})();
