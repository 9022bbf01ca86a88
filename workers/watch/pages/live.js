"use strict";
// Follows live runs: new records go into the charts, and the rest is shown as it is.
(() => {
  const { after } = JSON.parse(document.getElementById("data").textContent);

  function row(cells) {
    const made = document.createElement("tr");
    for (const text of cells) made.insertCell().textContent = text;
    return made;
  }

  function described(it) {
    const use = it.alive ? [`${Math.round(100 * it.cpu_share)}%`, `${(it.rss_bytes / 2 ** 30).toFixed(2)} GiB`] : ["", "gone"];
    const what = it.silent_s ? `has not answered for ${Math.round(it.silent_s)} s` : it.detail;
    return [`${it.role}-${it.rank}`, it.pid, ...use, what];
  }

  // Puts a newer table in the place of one, whose box keeps its focus and how far it is scrolled.
  function renew(place, html) {
    const made = document.createElement("template");
    made.innerHTML = html;
    const [old, table] = [place, made.content].map((one) => one.querySelector("table"));
    if (old && table) old.replaceWith(table);
    else place.replaceChildren(made.content);
  }

  const shows = [...document.querySelectorAll(".live")].map((head, run) => {
    const more = document.querySelectorAll(".run")[run];
    const [badge, line, state, spoken] = ["badge", "line", "state", "spoken"].map((name) => head.querySelector(`.${name}`));

    function fill(name, rows) {
      const body = more.querySelector(`.${name}`);
      body.replaceChildren(...rows.map(row));
      body.closest(".box").hidden = rows.length === 0;
    }

    let told;
    return (news) => {
      badge.textContent = news.is ?? "";
      badge.className = `badge ${news.is ?? ""}`;
      state.textContent = news.state;
      const about = news.about || news.state;
      if (about !== told) spoken.textContent = news.state; // read aloud once, not with each second that passes
      told = about;
      state.classList.toggle("alarm", news.is !== "ended");
      news.records.forEach((record) => hytrain.add(record, run));
      if (news.plans !== undefined) renew(more.querySelector(".plans"), news.plans);
      if (news.timeline !== undefined) more.querySelector(".timeline").innerHTML = news.timeline;
      if (news.line !== undefined) line.textContent = news.line;
      if (news.processes === undefined) return;
      more.querySelector(".reason").textContent = news.reason;
      more.querySelector(".more").textContent = news.more;
      fill("processes", news.processes.map(described));
      fill("cores", news.cores);
      fill("memory", news.memory);
    };
  });

  const token = new URLSearchParams(location.search).get("token") ?? "";
  const events = new EventSource(`/events?${new URLSearchParams({ token, after: after.join() })}`);
  events.onmessage = (event) => {
    const { runs, summary, ended } = JSON.parse(event.data);
    runs.forEach((news, run) => shows[run](news));
    if (summary !== null) renew(document.getElementById("summary"), summary);
    hytrain.show();
    if (ended) events.close();
  };
  events.onerror = () => shows.forEach((show) => show({ records: [], state: "this monitor does not answer: was it ended?" }));
})();
