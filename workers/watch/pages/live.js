"use strict";
// Follows live runs: new records go into the charts and the plans, and the rest is shown as it is.
(() => {
  const MOST_PLANS = 1000;
  const { after } = JSON.parse(document.getElementById("data").textContent);

  function row(cells, words = -1) {
    const made = document.createElement("tr");
    cells.forEach((text, index) => {
      const cell = made.insertCell();
      cell.textContent = text;
      if (index === words) cell.className = "words";
    });
    return made;
  }

  function described(it) {
    const use = it.alive ? [`${Math.round(100 * it.cpu_share)}%`, `${(it.rss_bytes / 2 ** 30).toFixed(2)} GiB`] : ["", "gone"];
    const what = it.silent_s ? `has not answered for ${Math.round(it.silent_s)} s` : it.detail;
    return [`${it.role}-${it.rank}`, it.pid, ...use, what];
  }

  const shows = [...document.querySelectorAll(".live")].map((place, run) => {
    const [state, spoken, line, reason] = ["state", "spoken", "line", "reason"].map((name) => place.querySelector(`.${name}`));
    const plans = document.querySelectorAll(".plans tbody")[run];
    const timeline = document.querySelectorAll(".timeline")[run];
    const known = new Set([...plans.rows].map((one) => Number(one.dataset.at))); // when they took effect

    function fill(name, rows) {
      const body = place.querySelector(`.${name}`);
      body.replaceChildren(...rows.map((cells) => row(cells)));
      body.closest(".box").hidden = rows.length === 0;
    }

    let told;
    return (news) => {
      state.textContent = news.state;
      const about = news.about || news.state;
      if (about !== told) spoken.textContent = news.state; // read aloud once, not with each second that passes
      told = about;
      state.classList.toggle("alarm", news.state !== "");
      for (const record of news.records) {
        hytrain.add(record, run);
        if (typeof record.reason !== "string" || known.has(record.wall_time)) continue;
        known.add(record.wall_time);
        if (known.size > 2 * MOST_PLANS) known.delete(known.values().next().value);
        const numbers = [record.k.toFixed(3), record.visiting_layers, record.offloaded_layers];
        plans.append(row([record.step, ...numbers, "–", "–", "–", record.reason], 7));
        if (plans.rows.length > MOST_PLANS) plans.deleteRow(0);
      }
      if (news.timeline !== undefined) timeline.innerHTML = news.timeline;
      if (news.line === undefined) return;
      line.textContent = news.line;
      reason.textContent = news.reason;
      fill("processes", news.processes.map(described));
      fill("cores", news.cores);
      fill("memory", news.memory);
    };
  });

  const token = new URLSearchParams(location.search).get("token") ?? "";
  const events = new EventSource(`/events?${new URLSearchParams({ token, after: after.join() })}`);
  events.onmessage = (event) => {
    const { runs, ended } = JSON.parse(event.data);
    runs.forEach((news, run) => shows[run](news));
    hytrain.show();
    if (ended) events.close();
  };
  events.onerror = () => shows.forEach((show) => show({ records: [], state: "this monitor does not answer: was it ended?" }));
})();
