"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const HEIGHT = 24, BUCKETS = 200, ALL = "all roles";
  const NAMES = { "fsdp.param_unshard": "#2f6fde", "fsdp.grad_reduce_shard": "#d9622b", "fsdp.grad_replicate_reduce": "#7a4fc4" };
  const OTHERS = ["#0d9488", "#b8860b", "#c0267e", "#4d7c0f", "#0369a1", "#9f1239"];
  const roleOf = (kind) => data.kinds[kind].role || "(" + data.kinds[kind].transport + ")";
  const roles = [...new Set(data.kinds.map((k, i) => roleOf(i)))].sort();
  const colours = Object.create(null);  // a role may be called __proto__
  roles.forEach((role, i) => { colours[role] = (Object.hasOwn(NAMES, role) && NAMES[role]) || (role[0] === "(" ? "#9aa3b2" : OTHERS[i % OTHERS.length]); });
  const text = (n) => (n < 0 ? "" : data.texts[n]);
  const bytes = (n) => {
    if (n === null) return "?";
    const units = ["B", "KiB", "MiB", "GiB", "TiB"]; let i = 0;
    while (n >= 1024 && i < 4) { n /= 1024; i++; }
    return (i ? n.toFixed(2) : n) + " " + units[i];
  };
  const element = (tag, content, name) => {
    const made = document.createElement(tag);
    if (content !== undefined) made.textContent = content;
    if (name) made.className = name;
    return made;
  };
  let graph = data.graphs[0] || null, found = [], chosen = -1;
  const searchable = new WeakMap();
  const rowsOf = (stage) => (graph && graph[stage]) || { node: [] };

  function words(table) {
    if (!searchable.has(table)) {
      const kinds = data.kinds.map((k) => Object.values(k).filter((v) => v !== null).join(" ").toLowerCase());
      const lower = data.texts.map((t) => t.toLowerCase());
      const told = Object.create(null);
      for (const [node, code] of graph ? graph.events : []) told[node] = (told[node] || "") + " " + code.toLowerCase();
      searchable.set(table, Array.from(table.node, (node, i) => [
        lower[node], kinds[table.kind[i]], text(table.unit[i]).toLowerCase(), text(table.lost[i]).toLowerCase(),
        ...(table.params[i] || []).map((p) => lower[p]), told[text(node)] || ""].join(" ")));
    }
    return searchable.get(table);
  }

  function filter() {
    const table = rowsOf($("stage").value), role = $("role").value;
    const wanted = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const index = wanted.length ? words(table) : null;
    found = [];
    for (let i = 0; i < table.node.length; i++) {
      if (role !== ALL && roleOf(table.kind[i]) !== role) continue;
      if (index && !wanted.every((word) => index[i].includes(word))) continue;
      found.push(i);
    }
    $("shown").textContent = found.length.toLocaleString("en") + " of " + table.node.length.toLocaleString("en");
    $("rows").firstElementChild.style.height = Math.max(found.length * HEIGHT, 1) + "px";
    draw();
  }

  function draw() {
    const box = $("rows"), space = box.firstElementChild, table = rowsOf($("stage").value);
    const from = Math.max(0, Math.floor(box.scrollTop / HEIGHT) - 5);
    const to = Math.min(found.length, from + Math.ceil(box.clientHeight / HEIGHT) + 10);
    const made = document.createDocumentFragment();
    for (let place = from; place < to; place++) {
      const i = found[place], kind = data.kinds[table.kind[i]], line = element("div", undefined, "row");
      if (i === chosen) line.classList.add("on");
      line.style.top = place * HEIGHT + "px";
      const role = element("span", roleOf(table.kind[i]));
      role.style.color = colours[roleOf(table.kind[i])];
      const params = table.params[i] ? table.params[i].slice(0, 4).map(text).join(", ") + (table.params[i].length > 4 ? " …" : "") : text(table.unit[i]);
      line.append(element("span", i), element("span", text(table.node[i])), role, element("span", kind.source || text(table.lost[i]), table.lost[i] >= 0 ? "warning" : ""),
        element("span", kind.transport), element("span", bytes(table.nbytes[i])), element("span", (kind.group ?? "?") + "/" + (kind.group_size ?? "?")), element("span", params));
      line.addEventListener("click", () => choose($("stage").value, i));
      made.append(line);
    }
    space.replaceChildren(made);
  }

  function choose(stage, i) {
    const table = rowsOf(stage), kind = data.kinds[table.kind[i]], node = text(table.node[i]);
    chosen = i;
    const lines = [node, "", ...Object.entries(kind).map(([k, v]) => k + ": " + v), "bytes: " + bytes(table.nbytes[i]), "parameter group: " + text(table.unit[i])];
    if (table.params[i]) lines.push("parameters: " + table.params[i].map(text).join(", "));
    if (table.members[i]) lines.push("merged from: " + table.members[i].map(text).join(", "));
    if (table.lost[i] >= 0) lines.push("absence: " + text(table.lost[i]));
    for (const e of graph.events) if (e[0] === node) lines.push([e[1], e[3] && "pass " + e[3], e[4], e[5] && "at " + e[5]].filter(Boolean).join("; "));
    $("detail").hidden = false;
    $("detail").firstElementChild.textContent = lines.join("\n");
    if ($("stage").value !== stage || !found.includes(i)) { $("stage").value = stage; $("search").value = ""; $("role").value = ALL; filter(); }
    $("rows").scrollTop = Math.max(0, found.indexOf(i) * HEIGHT - 150);
    draw();
  }

  const LANES = [["captured", 8], ["after", 72]];
  function timeline() {
    const canvas = $("timeline"), width = canvas.clientWidth, scale = window.devicePixelRatio || 1;
    canvas.width = width * scale; canvas.height = 132 * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    for (const [stage, top] of LANES) {
      const table = rowsOf(stage), count = table.node.length;
      pen.fillStyle = "#eef0f4"; pen.fillRect(0, top, width, 52);
      if (!count) continue;
      const sizes = table.nbytes.map((n) => Math.log2((n || 0) + 2)), most = sizes.reduce((a, b) => Math.max(a, b), 1);
      if (count <= width) {
        for (let i = 0; i < count; i++) {
          const x = (i * width) / count, wide = Math.max(1, width / count - (width / count > 4 ? 1 : 0)), tall = 8 + (44 * sizes[i]) / most;
          pen.fillStyle = colours[roleOf(table.kind[i])]; pen.fillRect(x, top + 52 - tall, wide, tall);
        }
        continue;
      }
      for (let x = 0; x < width; x++) {  // several a pixel: stacked by share
        const parts = Object.create(null); let all = 0;
        for (let i = Math.floor((x * count) / width); i < Math.floor(((x + 1) * count) / width); i++) { const r = roleOf(table.kind[i]); parts[r] = (parts[r] || 0) + 1; all++; }
        let y = top + 52;
        for (const role of roles) if (parts[role]) { const tall = (52 * parts[role]) / all; y -= tall; pen.fillStyle = colours[role]; pen.fillRect(x, y, 1, tall); }
      }
    }
  }
  function at(event) {
    const box = $("timeline").getBoundingClientRect(), y = event.clientY - box.top, [stage] = y < 66 ? LANES[0] : LANES[1];
    const count = rowsOf(stage).node.length, i = Math.floor(((event.clientX - box.left) * count) / box.width);
    return i >= 0 && i < count ? [stage, i] : null;
  }
  $("timeline").addEventListener("mousemove", (event) => {
    const hit = at(event); if (!hit) return;
    const [stage, i] = hit, table = rowsOf(stage);
    $("under").textContent = `${stage} ${i}: ${text(table.node[i])}, ${roleOf(table.kind[i])}, ${bytes(table.nbytes[i])}, ${(table.params[i] || []).slice(0, 3).map(text).join(", ") || text(table.unit[i])}`;
  });
  $("timeline").addEventListener("click", (event) => { const hit = at(event); if (hit) choose(...hit); });

  function buckets() {
    const table = rowsOf("after"), merged = [];
    for (let i = 0; i < table.node.length; i++) if (table.members[i]) merged.push(i);
    $("bucketcount").textContent = merged.length ? `${merged.length.toLocaleString("en")} merged collectives` + (merged.length > BUCKETS ? `, the first ${BUCKETS} shown` : "") : "none in this graph";
    const body = document.createDocumentFragment();
    if (merged.length) { const head = element("tr"); for (const name of ["node", "role", "unit", "bytes", "members"]) head.append(element("th", name)); body.append(head); }
    for (const i of merged.slice(0, BUCKETS)) {
      const line = element("tr"), members = table.members[i];
      line.append(element("td", text(table.node[i])), element("td", roleOf(table.kind[i])), element("td", text(table.unit[i])), element("td", bytes(table.nbytes[i]), "n"),
        element("td", members.length + ": " + members.slice(0, 12).map(text).join(", ") + (members.length > 12 ? " …" : "")));
      line.addEventListener("click", () => choose("after", i));
      body.append(line);
    }
    $("buckettable").replaceChildren(body);
  }

  function show(number) {
    graph = data.graphs[number] || null; chosen = -1;
    $("detail").hidden = true; $("rows").scrollTop = 0;
    timeline(); buckets(); filter();
  }
  data.graphs.forEach((g, i) => { const count = (g.captured || g.after).node.length; const option = element("option", `${g.name} (${count.toLocaleString("en")} collectives)`); option.value = i; $("graphs").append(option); });
  for (const role of [ALL, ...roles]) { const option = element("option", role); option.value = role; $("role").append(option); }
  for (const role of roles) { const mark = element("span"), dot = element("i"); dot.style.background = colours[role]; mark.append(dot, role); $("legend").append(mark); }
  let waiting = 0;
  $("search").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(filter, 80); });
  $("stage").addEventListener("change", filter); $("role").addEventListener("change", filter);
  $("graphs").addEventListener("change", (event) => show(+event.target.value));
  let drawing = false;
  $("rows").addEventListener("scroll", () => { if (!drawing) { drawing = true; requestAnimationFrame(() => { drawing = false; draw(); }); } });
  window.addEventListener("resize", () => { timeline(); draw(); });
  show(0);
})();
