"use strict";
// The form of will-it-fit.md: looks doctor's answer up in FITS (benchmarks/fits.py), and says it in doctor's words.
(() => {
  const form = document.getElementById("fit-form"), [ALONE, VISIT, OFFLOAD] = [1, 2, 4];
  const chosen = (name) => form.elements[name].value;
  const how = (precision) => (precision ? `not exact, with ${FITS.precisions[precision]}` : "exact");

  function answer(gpu, ram, cores, model) {
    const at = FITS.rams.indexOf(ram) * FITS.cores.length + FITS.cores.indexOf(cores);
    const cell = FITS.cells[`${gpu}, ${model}`][at], tokens = FITS.batch * FITS.sequence;
    const host = `${FITS.gpus[gpu]} with ${ram} GiB of host memory and ${cores} cores`;
    const step = `${FITS.batch} x ${FITS.sequence} tokens`;
    if (cell.length === 4) return yes(cell, tokens, host, step, model);
    const no = `No: ${model} does not train on ${host}`, last = FITS.precisions.length - 1;
    const sizes = cell.map((size, index) => `${size} GiB, ${how(cell.length === 2 && index === 0 ? 0 : last)}`);
    if (sizes.length) return [`${no} in any precision. With this GPU it needs ${sizes.join("; or ")}.`, ""];
    return [`${no}, whose GPU has too little memory for steps of ${step}.`, ""];
  }

  function yes([precision, stepS, share, flags], tokens, host, step, model) {
    const rate = (tokens / stepS).toLocaleString("en", { maximumFractionDigits: 0 });
    const speed = `about ${stepS.toFixed(2)} s per step of ${step}, ${rate} tokens/s, ${share}% of full speed`;
    const without = flags & ALONE ? " It fits without HyTrain, too, with torch's AdamW." : "";
    const options = { ...FITS.options[precision] };
    if (flags & VISIT) options.visit = "auto";
    if (flags & OFFLOAD) Object.assign(options, { offload_weights: "auto", device: "cuda" });
    const told = Object.entries(options).map(([name, value]) => `, ${name}="${value}"`);
    const first = flags & OFFLOAD ? "model" : "model.parameters()";
    return [
      `Yes: ${model} trains on ${host}: ${how(precision)}, ${speed} (a forecast).${without}`,
      `model.gradient_checkpointing_enable()\nopt = hytrain.AdamW(${first}, lr=1e-5${told.join("")})`,
    ];
  }

  function show() {
    const [gpu, model] = ["gpu", "model"].map(chosen), [ram, cores] = ["ram", "cores"].map(chosen).map(Number);
    const [verdict, paste] = answer(gpu, ram, cores, model), size = model.split(" ").slice(0, 2).join("");
    document.getElementById("fit-verdict").textContent = verdict;
    const code = document.getElementById("fit-paste");
    code.textContent = paste;
    code.parentElement.hidden = !paste;
    document.getElementById("fit-command").textContent =
      `bin/hytrain-cluster doctor --gpu "${gpu}" --ram ${ram}GiB --cores ${cores} --model ${size}`;
  }

  const wanted = new URLSearchParams(location.search);
  for (const [name, values, usual] of [
    ["gpu", Object.keys(FITS.gpus), "RTX 4090"],
    ["ram", FITS.rams, 64],
    ["cores", FITS.cores, 8],
    ["model", FITS.models, "8 B (Llama 3)"],
  ]) {
    for (const value of values) form.elements[name].add(new Option(name === "ram" ? `${value} GiB` : value, value));
    form.elements[name].value = wanted.get(name) ?? usual;
    form.elements[name].addEventListener("change", show);
  }
  show();
})();
