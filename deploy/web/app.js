// The page at /ui: a chat whose answers show where their time went, and the cluster as it works.
// Owns: what is drawn. Never: markup from an answer or a server; all of it becomes text.

const $ = (id) => document.getElementById(id);
const ms = (s) => (s === null || s === undefined ? "–" : s >= 10 ? `${s.toFixed(1)} s` : s >= 0.1 ? `${(s * 1e3).toFixed(0)} ms` : `${(s * 1e3).toFixed(1)} ms`);
const bytes = (n) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit += 1; }
  return `${unit ? n.toFixed(1) : n} ${units[unit]}`;
};

function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== "") made.textContent = text;
  return made;
}

async function call(path, options = {}) {
  const response = await fetch(path, { headers: headers(), ...options });
  if (!response.ok) throw Object.assign(new Error(await reason(response)), { status: response.status });
  return response;
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `HTTP ${response.status}`;
  }
}

// ------------------------------------------------------------------------------------------------ a timeline

const STAGES = ["gateway", "queue", "reserve", "restore", "prefill", "transfer", "decode", "rest"];
const STAGE_WORDS = {
  gateway: "waited for its turn", queue: "waited on its worker", reserve: "waited for pages", restore: "read from tiers", prefill: "prompt computed",
  transfer: "KV handed over", decode: "tokens produced", rest: "gateway and network",
};

// Chunks travel while later ones are computed: what is drawn as transfer is what came on top of computing.
export function stages(extension) {
  const time = extension.timeline;
  const handed = time.handoff_s > 0;
  const spans = {
    gateway: time.gateway_s,
    queue: Math.max(0, time.queue_s - time.reserve_wait_s),
    reserve: time.reserve_wait_s,
    restore: time.restore_s,
    prefill: handed ? Math.min(time.prefill_s, time.handoff_s) : time.prefill_s,
    transfer: handed ? Math.max(0, time.handoff_s - time.prefill_s) : 0,
    decode: time.decode_s,
  };
  const sum = Object.values(spans).reduce((total, one) => total + one, 0);
  spans.rest = Math.max(0, extension.total_s - sum);
  return spans;
}

function bar(parts, words) {
  const drawn = element("div", "bar");
  const total = parts.reduce((sum, [, size]) => sum + size, 0);
  for (const [name, size] of parts) {
    if (!size || !total) continue;
    const part = element("i");
    part.style.background = `var(--${name})`;
    part.style.flex = `${size / total} 0 0`;
    part.title = words(name, size);
    part.dataset.name = name;
    drawn.append(part);
  }
  return drawn;
}

function legendEntry(name, text) {
  const entry = element("span");
  const colour = element("i");
  colour.style.background = `var(--${name})`;
  entry.append(colour, text);
  return entry;
}

function timeline(extension, usage) {
  const spans = stages(extension);
  const time = extension.timeline;
  const box = element("div", "timeline");
  box.append(bar(STAGES.map((name) => [name, spans[name]]), (name, size) => `${STAGE_WORDS[name]}: ${ms(size)}`));
  const legend = element("p", "times");
  for (const name of STAGES) if (spans[name] > 0) legend.append(legendEntry(name, `${name} ${ms(spans[name])}`));
  const told = [`first token ${ms(extension.ttft_s)}`];
  if (usage) {
    told.push(`${usage.prompt_tokens} prompt tokens`);
    const cached = usage.prompt_tokens_details?.cached_tokens;
    if (cached) told.push(`${cached} of them cached`);
    told.push(`${usage.completion_tokens} tokens out`);
    if (time.decode_s > 0) told.push(`${(usage.completion_tokens / time.decode_s).toFixed(1)} tokens/s`);
  }
  if (time.lane) told.push(`${bytes(time.transfer_bytes)} over ${time.lane}, ${time.prefill_worker} → ${time.decode_worker}`);
  else if (time.decode_worker) told.push(`on ${time.decode_worker} alone`);
  if (extension.placements > 1) told.push(`moved to another worker ${extension.placements - 1} times`);
  const facts = element("p", "times");
  for (const fact of told) facts.append(element("span", "", fact));
  box.append(legend, facts);
  return box;
}

// ------------------------------------------------------------------------------------------------------ chat

const chat = { messages: [], session: null, model: null, stopper: null };

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function number(id) {
  const text = $(id).value.trim();
  return text === "" ? {} : { [id]: Number(text) };
}

// Text with ``` fences; nothing else is interpreted.
function show(box, text) {
  box.replaceChildren();
  text.split("```").forEach((part, index) => {
    if (index % 2) box.append(element("pre", "", part.replace(/^[\w+-]*\n/, "").replace(/\n$/, "")));
    else if (part) box.append(index ? part.replace(/^\n/, "") : part);
  });
}

function said(role, text) {
  const entry = element("article", `said ${role}`);
  const box = element("div", "text");
  show(box, text);
  entry.append(box);
  $("talk").querySelector(".empty")?.remove();
  $("talk").append(entry);
  entry.scrollIntoView({ block: "end" });
  return [entry, box];
}

async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = response.body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

async function openSession() {
  const response = await call("v1/sessions", { method: "POST", headers: headers() });
  return (await response.json()).id;
}

function closeSession() {
  if (chat.session) fetch(`v1/sessions/${chat.session}`, { method: "DELETE", headers: headers(), keepalive: true }).catch(() => {});
  chat.session = null;
}

async function request(messages, signal) {
  for (let again = 0; ; again += 1) {
    chat.session ??= await openSession();
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), signal,
      body: JSON.stringify({
        model: chat.model, messages, stream: true, stream_options: { include_usage: true }, session_id: chat.session,
        ...number("temperature"), ...number("max_tokens"), ...number("seed"),
      }),
    });
    if (response.ok) return response;
    const error = (await response.json().catch(() => ({}))).error ?? { message: `HTTP ${response.status}` };
    if (error.code === "session_not_found" && !again) { chat.session = null; continue; }
    throw new Error(error.message);
  }
}

async function ask(text) {
  const system = $("system").value.trim();
  const asked = [...chat.messages, { role: "user", content: text }];
  said("user", text);
  const [entry, box] = said("assistant waiting", "");
  chat.stopper = new AbortController();
  busy(true);
  let answer = "", extension = null, usage = null;
  try {
    const messages = system ? [{ role: "system", content: system }, ...asked] : asked;
    for await (const chunk of events(await request(messages, chat.stopper.signal))) {
      if (chunk.error) throw new Error(chunk.error.message);
      answer += chunk.choices?.[0]?.delta?.content ?? "";
      extension = chunk.baton ?? extension;
      usage = chunk.usage ?? usage;
      show(box, answer);
    }
    if (extension) entry.append(timeline(extension, usage));
  } catch (error) {
    if (error.name === "AbortError") entry.append(element("p", "times", "stopped"));
    else entry.append(element("p", "failed", error.message));
  }
  entry.classList.remove("waiting");
  if (answer) chat.messages = [...asked, { role: "assistant", content: answer }];
  busy(false);
  entry.scrollIntoView({ block: "end" });
}

function busy(yes) {
  $("send").disabled = yes;
  $("stop").hidden = !yes;
  if (!yes) { chat.stopper = null; $("text").focus(); }
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || chat.stopper) return;
  $("text").value = "";
  ask(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); }
});
$("stop").addEventListener("click", () => chat.stopper?.abort());
$("anew").addEventListener("click", () => {
  chat.stopper?.abort();
  closeSession();
  chat.messages = [];
  $("talk").replaceChildren(element("p", "empty", "Ask something."));
  $("text").focus();
});
addEventListener("pagehide", closeSession);

// --------------------------------------------------------------------------------------------------- cluster

const OWNERS = ["request", "session", "incoming", "outgoing", "quarantined", "cached_locked", "cached", "free"];
const seen = { steps: new Map(), at: 0 };

function fill(table, names, rows) {
  const head = element("tr");
  names.forEach((name) => head.append(element("th", name.startsWith("<") ? "name" : "", name.replace("<", ""))));
  const body = rows.map((cells) => {
    const row = element("tr");
    cells.forEach((cell, index) => {
      const made = element("td", names[index].startsWith("<") ? "name" : "");
      made.append(cell);
      row.append(made);
    });
    return row;
  });
  table.replaceChildren(head, ...body);
}

function state(worker) {
  if (worker.silent) return element("span", "bad", "silent");
  if (worker.load.draining) return element("span", "warn", "draining");
  if (worker.load.step_age_s > 1) return element("span", "warn", `step for ${worker.load.step_age_s.toFixed(0)} s`);
  return element("span", "ok", "ok");
}

function pages(detail) {
  const box = element("div");
  for (const census of [detail?.census, ...Object.values(detail?.components ?? {})]) {
    if (census?.total) box.append(bar(OWNERS.map((name) => [name, census[name]]), (name, count) => `${name.replace("_", " ")}: ${count} pages`));
  }
  return box;
}

function stepRate(worker, passed) {
  const key = `${worker.worker}@${worker.incarnation}`;
  const before = seen.steps.get(key);
  seen.steps.set(key, worker.load.steps);
  return before === undefined || !passed || !worker.load.total_pages ? "" : ((worker.load.steps - before) / passed).toFixed(1);
}

function figure(name, value, more) {
  const box = element("div", "figure");
  box.append(element("small", "", name), element("b", "", value), element("small", "", more));
  return box;
}

function drawFigures(recent) {
  const rate = (count) => (recent.span_s ? (count / recent.span_s).toFixed(1) : "–");
  const ended = Object.values(recent.outcomes).reduce((sum, one) => sum + one, 0);
  const bad = Object.entries(recent.outcomes).filter(([name]) => name !== "stop" && name !== "length");
  const quantiles = (of) => `p90 ${ms(of.p90_s)}, p99 ${ms(of.p99_s)}`;
  $("figures").replaceChildren(
    figure("requests/s", rate(ended), bad.map(([name, count]) => `${count} ${name}`).join(", ") || "none failed"),
    figure("output tokens/s", rate(recent.output_tokens), `${rate(recent.prompt_tokens)} prompt tokens/s`),
    figure("first token", ms(recent.ttft.p50_s), quantiles(recent.ttft)),
    figure("between tokens", ms(recent.itl.p50_s), quantiles(recent.itl)),
    figure("whole answer", ms(recent.total.p50_s), quantiles(recent.total)),
  );
}

function drawLanes(status) {
  const rows = [];
  for (const [worker, detail] of Object.entries(status.details)) {
    for (const flow of detail.flows ?? []) {
      if (flow.direction !== "in") continue;
      const done = flow.handoff.counts.reduce((sum, one) => sum + one, 0);
      const gbps = flow.recent_gbps || (flow.busy_s > 0 ? flow.nbytes / flow.busy_s / 1e9 : 0);
      rows.push([flow.peer, worker, flow.lane || "–", gbps.toFixed(2), String(done), bytes(flow.nbytes), String(flow.failed)]);
    }
  }
  fill($("lanes"), ["<from", "<to", "<lane", "GB/s", "hand-offs", "moved", "failed"], rows);
}

async function drawHandoffs(status) {
  const choice = $("whose");
  const names = status.workers.filter((one) => one.load.total_pages).map((one) => one.worker);
  if (names.join() !== [...choice.options].map((one) => one.value).join()) {
    const chosen = choice.value;
    choice.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
  }
  if (!choice.value) return;
  const found = await (await call(`handoffs/${encodeURIComponent(choice.value)}`)).json();
  const open = found.filter((one) => one.outcome === "open");
  const last = found.filter((one) => one.outcome !== "open").slice(-8).reverse();
  fill($("handoffs"), ["<hand-off", "<request", "<with", "<lane", "<state", "tokens", "moved", "took"], [...open, ...last].map((one) => [
    one.handoff.slice(0, 14), one.request_id.slice(0, 12), `${one.direction === "in" ? "from" : "to"} ${one.peer}`, one.lane || "–",
    element("span", one.outcome === "failed" ? "bad" : one.outcome === "open" ? "warn" : "ok", one.reason ? `${one.outcome}: ${one.reason}` : one.outcome),
    String(one.tokens), bytes(one.nbytes), ms(Math.max(0, ...Object.values(one.marks))),
  ]));
}

function drawSlowest(recent) {
  fill($("slowest"), ["<request", "ago", "total", "first token", "<where the time went", "prompt", "out", "<decoded by"], recent.slowest.map((one) => {
    const spans = stages(one);
    return [
      one.request_id.slice(0, 12), `${one.ended_s_ago.toFixed(0)} s`, ms(one.total_s), ms(one.ttft_s),
      bar(STAGES.map((name) => [name, spans[name]]), (name, size) => `${STAGE_WORDS[name]}: ${ms(size)}`),
      String(one.prompt_tokens), String(one.completion_tokens), one.timeline.decode_worker,
    ];
  }));
}

async function look() {
  const status = await (await call("status")).json();
  const now = performance.now() / 1e3;
  const passed = seen.at ? now - seen.at : 0;
  seen.at = now;
  $("state").replaceChildren(
    status.ready ? element("span", "ok", "ready") : element("span", "bad", `not ready: ${status.reason}`),
    ` · ${status.requests.running} running, ${status.requests.queued} waiting · baton ${status.version}`,
  );
  drawFigures(status.recent);
  fill($("workers"), ["<worker", "<state", "running", "queued", "tokens queued", "steps/s", "<pages"], status.workers.map((one) => [
    `${one.worker}@${one.incarnation}`, state(one), String(one.load.running), String(one.load.queued),
    one.load.total_pages ? String(one.load.queued_tokens) : "", stepRate(one, passed), pages(status.details[one.worker]),
  ]));
  $("owners").replaceChildren(...OWNERS.map((name) => legendEntry(name, name.replace("_", " "))));
  drawLanes(status);
  drawSlowest(status.recent);
  await drawHandoffs(status);
}

async function watch() {
  if (!$("cluster").hidden && !document.hidden) {
    try {
      await look();
    } catch (error) {
      const what = error.status === 403 ? error.message : `the gateway does not answer: ${error.message}`;
      $("state").replaceChildren(element("span", "bad", what));
    }
  }
  setTimeout(watch, 1000);
}

// ------------------------------------------------------------------------------------------------------ tabs

function open(name) {
  for (const one of ["chat", "cluster"]) {
    $(one).hidden = one !== name;
    $(`tab-${one}`).setAttribute("aria-selected", String(one === name));
  }
  history.replaceState(null, "", `#${name}`);
}

$("tab-chat").addEventListener("click", () => open("chat"));
$("tab-cluster").addEventListener("click", () => open("cluster"));
if (location.hash === "#cluster") open("cluster");

try {
  chat.model = (await (await call("v1/models")).json()).data[0].id;
  $("model").textContent = chat.model;
} catch (error) {
  $("model").textContent = `no gateway: ${error.message}`;
}
watch();
