"use strict";
// Draws the charts of the page's data, in the colours of its style; again if the window, its colours or a choice change.
const hytrain = (() => {
  const { charts, axes, runs } = JSON.parse(document.getElementById("data").textContent);
  const place = document.getElementById("charts");
  const [seen, folded] = ["div", "div"].map((kind) => Object.assign(document.createElement(kind), { className: "charts" }));
  const DASHES = [[], [7, 4], [2, 3]];
  const HEIGHT = 230, LARGE = 380, MOST_POINTS = 4000;
  const MINUTE = 60, HOUR = 3600, DAY = 86400;
  const TIMES = [0.1, 0.5, 1, 2, 5, 10, 30, MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 30 * MINUTE, HOUR, 2 * HOUR,
    6 * HOUR, 12 * HOUR, DAY, 2 * DAY, 7 * DAY, 28 * DAY];
  const chosen = { axis: "steps", log: false, smooth: 0 };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = (value) => (value == null ? "–" : value.toLocaleString("en", { maximumSignificantDigits: 5 }));
  const short = (value) => value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 });
  const says = (line) => line.values.some((value) => value !== 0); // a line of zeros says nothing
  const height = (chart) => (chart.large ? LARGE : HEIGHT);

  function duration(seconds) {
    const [unit, name] = [[DAY, "d"], [HOUR, "h"], [MINUTE, "min"]].find(([one]) => seconds >= one) ?? [1, "s"];
    return `${(seconds / unit).toLocaleString("en", { maximumSignificantDigits: 3 })} ${name}`;
  }

  const AXES = {
    steps: { label: "step", told: number, tick: number },
    tokens: { label: "tokens", told: short, tick: short },
    seconds: { label: "time", told: duration, tick: duration, incrs: TIMES },
  };

  // How many tokens or seconds a run has had by a step: between two known steps, a part of what lies between them.
  function reached(axis, name, step) {
    const { steps } = axis, values = axis[name];
    let low = 0, high = steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1;
      else high = middle;
    }
    if (low === steps.length) return values.at(-1) ?? 0;
    if (low === 0 || steps[low] === step) return values[low];
    const share = (step - steps[low - 1]) / (steps[low] - steps[low - 1]);
    return values[low - 1] + share * (values[low] - values[low - 1]);
  }

  function xs(line) {
    if (chosen.axis === "steps") return line.steps;
    const found = line.steps.map((step) => reached(axes[line.run], chosen.axis, step));
    return found.map((value, index) => (index && value <= found[index - 1] ? NaN : value));
  }

  // The mean of the values so far, of which older ones count less and less.
  function smoothed(values, by) {
    let sum = 0, weight = 0;
    return values.map((value) => {
      sum = by * sum + (1 - by) * value;
      weight = by * weight + (1 - by);
      return sum / weight;
    });
  }

  // What is drawn: a line, or if it is to be smoothed the line itself, faint, and its mean. Validation is not.
  function drawn(chart) {
    return chart.lines.flatMap((line) => {
      if (!chart.large || !chosen.smooth || line.style) return [{ line, values: line.values }];
      return [{ line, values: line.values, faint: true }, { line, values: smoothed(line.values, chosen.smooth), mean: true }];
    });
  }

  // Copies: uPlot may keep the arrays that it is given, and what it has drawn is to stay as it is while lines grow.
  function joined(chart) {
    const isLog = chart.large && chosen.log;
    return uPlot.join(drawn(chart).map(({ line, values }) => {
      const at = xs(line), kept = at.map((x, index) => !Number.isNaN(x) && !(isLog && values[index] <= 0));
      return [at.filter((_, index) => kept[index]), values.filter((_, index) => kept[index])];
    }));
  }

  function describe(chart) {
    const told = chart.lines.map(({ label, values }) => `${label} from ${number(values[0])} to ${number(values.at(-1))}`);
    return `${chart.title}${chart.unit ? `, in ${chart.unit}` : ""}. ${chart.about}. ${told.join("; ")}.`;
  }

  // With one run, each line has a colour; with several, each run has, and its lines have dashes.
  function look({ line, faint, mean }) {
    const its = colour(`--run-${(runs.length === 1 ? line.style : line.run) % 6}`);
    return {
      label: mean ? `${line.label}, smoothed` : line.label,
      stroke: faint ? `${its}55` : its,
      width: faint ? 1 : 1.75,
      dash: runs.length === 1 ? [] : DASHES[line.style % DASHES.length],
      points: { show: line.steps.length < 40 && !mean, size: 5 },
      spanGaps: true,
      value: (_, value) => number(value),
    };
  }

  // A logarithmic axis around the values, not from one power of ten to the next.
  const LOG = { distr: 3, range: (_, low, high) => [low / 1.05, high * 1.05] };
  function between(_, __, low, high) {
    const ratio = (high / low) ** (1 / 6);
    return [...new Set([0, 1, 2, 3, 4, 5, 6].map((part) => Number((low * ratio ** part).toPrecision(2))))];
  }

  function draw(chart) {
    chart.plot?.destroy();
    const ink = colour("--ink"), faint = colour("--faint"), isLog = chart.large && chosen.log, x = AXES[chosen.axis];
    const axis = { stroke: ink, font: "12px system-ui, sans-serif", grid: { stroke: faint, width: 1 }, ticks: { stroke: faint, width: 1 } };
    const plot = (chart.plot = new uPlot(
      {
        width: Math.max(chart.figure.clientWidth, 200),
        height: height(chart),
        scales: { x: { time: false }, y: isLog ? LOG : chart.top === null ? {} : { range: [0, chart.top] } },
        series: [{ label: x.label, value: (_, value) => (value == null ? "–" : x.told(value)) }, ...drawn(chart).map(look)],
        axes: [
          { ...axis, values: (_, ticks) => ticks.map(x.tick), ...(x.incrs && { incrs: x.incrs }) },
          { ...axis, size: 62, values: (_, ticks) => ticks.map(number), ...(isLog && { splits: between, filter: (_, all) => all }) },
        ],
        cursor: { drag: { x: true, y: false } },
      },
      joined(chart),
      chart.figure,
    ));
    plot.root.querySelectorAll(".u-legend .u-series").forEach((row, index) => {
      if (index === 0) return;
      row.hidden = drawn(chart)[index - 1].faint === true;
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
    figure.classList.toggle("large", chart.large);
    figure.tabIndex = 0;
    figure.setAttribute("aria-label", describe(chart));
    figure.title = chart.about;
    figure.addEventListener("keydown", (event) => steer(chart.plot, event));
    const next = charts.slice(charts.indexOf(chart) + 1).find((other) => other.figure && other.folded === chart.folded);
    (chart.folded ? folded : seen).insertBefore(figure, next ? next.figure : null);
    if (chart.folded) folded.parentElement.hidden = false;
    draw(chart);
    let width = figure.clientWidth;
    new ResizeObserver(() => {
      if (figure.clientWidth === width) return;
      width = figure.clientWidth;
      chart.plot.setSize({ width: Math.max(width, 200), height: height(chart) });
    }).observe(figure);
    document.body.dataset.charts = String(charts.filter((other) => other.figure).length);
  }

  function extend(columns, values) {
    const [steps] = columns;
    while (steps.length && steps.at(-1) >= values[0]) columns.forEach((column) => column.pop()); // the loop went back
    if (steps.length >= MOST_POINTS) {
      for (const column of columns) column.splice(0, column.length, ...column.filter((_, index) => index % 2));
    }
    columns.forEach((column, index) => column.push(values[index]));
  }

  const began = axes.map(() => undefined); // when a run's first record was, in seconds since 1970

  // A live run's next record; `show` draws it.
  function add(record, run) {
    const { steps, tokens, seconds } = axes[run];
    began[run] ??= record.wall_time - (seconds.at(-1) ?? 0);
    extend([steps, tokens, seconds], [record.step, (tokens.at(-1) ?? 0) + (record.tokens ?? 0), record.wall_time - began[run]]);
    for (const chart of charts) {
      for (const line of chart.lines) {
        const value = record[line.metric];
        if (line.run !== run || typeof value !== "number") continue;
        extend([line.steps, line.values], [record.step, value * chart.factor]);
        chart.grows = true;
      }
    }
  }

  // Draws what was added, once for all of it: uPlot's scales follow its data only after this script is done.
  function show() {
    offer();
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

  const redraw = (some) => charts.filter((chart) => chart.figure && some(chart)).forEach(draw);
  const controls = document.createElement("div");
  const choices = document.createElement("select");

  function labelled(words, input) {
    const label = document.createElement("label");
    label.append(words, input);
    controls.append(label);
    return input;
  }

  function offer() {
    choices.options[1].disabled = !axes.some(({ tokens }) => tokens.at(-1) > 0);
  }

  function control() {
    controls.className = "controls";
    for (const [value, text] of [["steps", "steps"], ["tokens", "tokens"], ["seconds", "wall time"]]) choices.add(new Option(text, value));
    labelled("over ", choices).addEventListener("change", () => {
      chosen.axis = choices.value;
      redraw(() => true);
    });
    offer();
    const smooth = Object.assign(document.createElement("input"), { type: "range", min: 0, max: 0.99, step: 0.01, value: 0 });
    labelled("smoothing of the loss ", smooth).addEventListener("input", () => {
      chosen.smooth = Number(smooth.value);
      redraw((chart) => chart.large);
    });
    const log = Object.assign(document.createElement("input"), { type: "checkbox" });
    labelled("logarithmic loss ", log).addEventListener("change", () => {
      chosen.log = log.checked;
      redraw((chart) => chart.large);
    });
    const more = document.createElement("details"), summary = document.createElement("summary");
    summary.append(Object.assign(document.createElement("strong"), { textContent: "More charts" }));
    more.append(summary, folded);
    more.hidden = true;
    place.append(controls, seen, more);
  }

  document.body.dataset.charts = "0";
  control();
  charts.filter((chart) => chart.lines.some(says)).forEach(begin);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw(() => true));
  return { charts, add, show };
})();
