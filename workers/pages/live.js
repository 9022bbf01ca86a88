"use strict";
// Follows a live run: new records go into the charts and the plans, and the rest is shown as it is.
(() => {
  const [line, reason, state, rows] = ["line", "reason", "state", "processes"].map((id) => document.getElementById(id));
  const plans = document.querySelector("#plans tbody");

  const known = new Set([...plans.rows].map((one) => Number(one.dataset.at))); // when they took effect

  function row(cells, words = -1) {
    const made = document.createElement("tr");
    cells.forEach((text, index) => {
      const cell = made.insertCell();
      cell.textContent = text;
      if (index === words) cell.className = "words";
    });
    return made;
  }

  function show(news) {
    if (state.textContent !== news.state) state.textContent = news.state; // it is read aloud
    state.classList.toggle("alarm", news.state !== "");
    for (const record of news.records) {
      hytrain.add(record);
      if (typeof record.reason !== "string" || known.has(record.wall_time)) continue;
      known.add(record.wall_time);
      const numbers = [record.k.toFixed(3), record.visiting_layers, record.streamed_layers];
      plans.append(row([record.step, ...numbers, "–", "–", "–", record.reason], 7));
    }
    if (news.line === undefined) return;
    line.textContent = news.line;
    reason.textContent = news.reason;
    rows.replaceChildren(
      ...news.processes.map((it) => {
        const use = it.alive ? [`${Math.round(100 * it.cpu_share)}%`, `${(it.rss_bytes / 2 ** 30).toFixed(2)} GiB`] : ["", "gone"];
        const what = it.silent_s ? `has not answered for ${Math.round(it.silent_s)} s` : it.detail;
        return row([`${it.role}-${it.rank}`, it.pid, ...use, what]);
      }),
    );
  }

  const { after } = JSON.parse(document.getElementById("data").textContent);
  const token = new URLSearchParams(location.search).get("token") ?? "";
  const events = new EventSource(`/events?${new URLSearchParams({ token, after })}`);
  events.onmessage = (event) => {
    const news = JSON.parse(event.data);
    show(news);
    if (news.ended) events.close();
  };
  events.onerror = () => show({ records: [], state: "this monitor does not answer: was it ended?" });
})();
