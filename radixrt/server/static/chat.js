// The chat: what was said, the settings of the next answer, and the answer as it comes.

const talk = []; // {role, text, thought, error, usage, ...}
let writing = null; // the AbortController of the answer that comes
let finished = Promise.resolve(); // once nothing of the last answer comes any more
let edits = -1; // the message that is being edited

// ---- settings

for (const name of ["system", "sampling", "schema"]) {
  $("open-" + name).addEventListener("click", () => {
    const shows = $("box-" + name).hidden;
    for (const other of ["system", "sampling", "schema"]) {
      $("box-" + other).hidden = other !== name || !shows;
      $("open-" + other).setAttribute("aria-expanded", String(other === name && shows));
    }
    if (shows) $("box-" + name).querySelector("textarea, input").focus();
  });
}
for (const name of ["temperature", "top_p"]) $(name).addEventListener("input", () => { $(name + "-is").textContent = $(name).value; });
$("box-sampling").addEventListener("submit", (event) => event.preventDefault());
const marks = () => {
  $("open-system").classList.toggle("set", Boolean($("system").value.trim()));
  $("open-sampling").classList.toggle("set", ["temperature", "top_p", "max_tokens", "seed"].some((name) => $(name).value !== $(name).defaultValue));
};
$("chat").addEventListener("input", marks);

// ---- the schema, judged while it is written

const schema = { value: undefined, problem: "" }; // undefined: none
let judged = 0;
function schemaSays(kind, text) {
  $("schema-says").className = "says " + kind;
  $("schema-says").textContent = plain(text);
  $("open-schema").classList.toggle("set", kind === "good");
  $("open-schema").classList.toggle("wrong", kind === "bad");
  $("schema").setAttribute("aria-invalid", String(kind === "bad"));
}
async function judge() {
  const turn = ++judged, text = $("schema").value;
  schema.value = undefined;
  schema.problem = "";
  if (!text.trim()) return schemaSays("", "Nothing given: the answer is free.");
  try { schema.value = JSON.parse(text); } catch (error) {
    schema.problem = "This is not JSON: " + error.message;
    return schemaSays("bad", schema.problem);
  }
  schemaSays("", "…");
  await wait(250);
  if (turn !== judged) return;
  try {
    const found = await (await ask("/v1/schema/check", { schema: text })).json();
    if (turn !== judged) return;
    schema.problem = found.valid ? "" : found.problem;
    schemaSays(found.valid ? "good" : "bad", found.valid ? "✓ The answer will be valid JSON of this schema, whatever the model wants to say." : found.problem);
  } catch (error) {
    if (turn === judged) schemaSays("bad", error.message);
  }
}
$("schema").addEventListener("input", judge);
$("schema-clear").addEventListener("click", () => { $("schema").value = ""; judge(); $("schema").focus(); });
$("schema-example").addEventListener("click", () => {
  $("schema").value = JSON.stringify({ type: "object", properties: { name: { type: "string", maxLength: 40 }, age: { type: "integer", minimum: 0, maximum: 130 }, likes: { type: "array", items: { enum: ["music", "books", "rivers"] }, maxItems: 3 } }, required: ["name", "age", "likes"], additionalProperties: false }, null, 2);
  judge();
});

// ---- what is shown

function fill(where, text) {
  where.replaceChildren();
  plain(text).split(/^```.*$/m).forEach((part, at) => {
    if (at % 2) where.append(make("pre", "", part.replace(/^\n|\n$/g, "")));
    else where.append(at ? part.replace(/^\n/, "") : part);
  });
}
function button(text, act, label = "") {
  const found = make("button", "quiet", text);
  found.type = "button";
  if (label) found.setAttribute("aria-label", label);
  found.addEventListener("click", act);
  return found;
}
function meta(message) {
  const place = make("div", "meta"), usage = message.usage;
  if (usage) {
    const details = usage.prompt_tokens_details || {}, found = details.cached_tokens || 0, share = make("span", "share", null, make("i"));
    share.firstChild.style.width = (100 * found) / Math.max(1, usage.prompt_tokens) + "%";
    place.append(make("span", "cached", null, share, count(found) + " of " + count(usage.prompt_tokens) + " from the cache"));
    const seconds = (message.ended - message.first) / 1000, made = usage.completion_tokens;
    place.append(make("span", "", count(made) + " tokens" + (made > 1 && seconds > 0 ? ", " + ((made - 1) / seconds).toFixed(1) + "/s" : "")));
    place.append(make("span", "", "first in " + span((message.first - message.asked) / 1000)));
  }
  if (message.note) place.append(make("span", "note", message.note));
  return place;
}
function show(at) {
  const message = talk[at], mineToo = message.role === "user", item = make("li", "message " + message.role);
  const body = make("div", "said" + (message.json ? " json" : ""));
  fill(body, message.text);
  if (edits === at) return editor(at);
  if (message.thought) {
    const inner = make("div", "", plain(message.thought)), shut = make("details", "thought", null, make("summary", "", "Thought"), inner);
    shut.open = Boolean(message.comes && !message.text);
    item.append(shut);
  }
  if (message.comes) item.classList.add("runs-on");
  if (message.text || message.comes || mineToo) item.append(body);
  if (message.error) {
    const error = make("div", "error", plain(message.error));
    error.setAttribute("role", "alert");
    item.append(error);
  }
  if (!message.comes) {
    const line = meta(message);
    if (mineToo) line.append(button("Edit", () => { edits = at; again(at); }, "Edit message " + (at + 1)));
    else line.append(button(message.error ? "Try again" : "Regenerate", () => answer(at)));
    if (message.text) line.append(button("Copy", () => navigator.clipboard && navigator.clipboard.writeText(message.text)));
    item.append(line);
  }
  return item;
}
function editor(at) {
  const item = make("li", "message user edits"), text = make("textarea"), line = make("div", "meta");
  text.value = talk[at].text;
  text.rows = Math.min(10, text.value.split("\n").length + 1);
  text.setAttribute("aria-label", "The message");
  const leave = () => { edits = -1; again(at); $("messages").children[at].querySelector("button").focus(); };
  const save = () => {
    if (!text.value.trim()) return;
    edits = -1;
    talk[at].text = text.value;
    answer(at + 1);
  };
  text.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); leave(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); save(); }
  });
  line.append(button("Send again", save), button("Cancel", leave));
  item.append(text, line);
  queueMicrotask(() => { text.focus(); text.setSelectionRange(text.value.length, text.value.length); });
  return item;
}
function again(at) {
  const list = $("messages"), item = show(at), log = $("log"), end = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  if (list.children[at]) list.children[at].replaceWith(item); else list.append(item);
  if (end) log.scrollTop = log.scrollHeight;
}
function whole() {
  $("welcome").hidden = talk.length > 0;
  $("messages").replaceChildren(...talk.map((_, at) => show(at)));
  $("log").scrollTop = $("log").scrollHeight;
}

// ---- the answer

function body(messages) {
  const asked = { model: chosen.model || undefined, messages, stream: true, stream_options: { include_usage: true }, temperature: Number($("temperature").value), top_p: Number($("top_p").value) };
  if ($("max_tokens").value) asked.max_tokens = Number($("max_tokens").value);
  if ($("seed").value) asked.seed = Number($("seed").value);
  if (schema.value !== undefined) asked.response_format = { type: "json_schema", json_schema: { name: "answer", schema: schema.value, strict: true } };
  return asked;
}
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
async function answer(at) {
  while (writing) { // the one that comes is not wanted any more
    writing.abort();
    await finished;
  }
  finished = respond(at);
  await finished;
}
async function respond(at) {
  if (schema.problem) {
    if ($("box-schema").hidden) $("open-schema").click();
    schemaSays("bad", schema.problem);
    return;
  }
  talk.length = at;
  edits = -1;
  const messages = talk.filter((one) => one.text).map((one) => ({ role: one.role, content: one.text }));
  if ($("system").value.trim()) messages.unshift({ role: "system", content: $("system").value });
  const now = { role: "assistant", text: "", thought: "", comes: true, asked: performance.now(), first: 0, ended: 0, json: schema.value !== undefined };
  talk.push(now);
  whole();
  writing = new AbortController();
  turnTo(true);
  let due = false, reason = "";
  const redraw = () => { if (!due) { due = true; requestAnimationFrame(() => { due = false; if (now.comes && talk[at] === now) again(at); }); } };
  poll();
  try {
    for await (const chunk of events(await ask("/v1/chat/completions", body(messages), writing.signal))) {
      if (chunk.error) throw new Refused(500, chunk.error.message);
      mine = chunk.id || mine;
      if (chunk.usage) now.usage = chunk.usage;
      const choice = chunk.choices && chunk.choices[0];
      if (!choice) continue;
      const { content, reasoning_content: thought } = choice.delta || {};
      if ((content || thought) && !now.first) now.first = performance.now();
      if (content) now.text += content;
      if (thought) now.thought += thought;
      if (choice.finish_reason) { reason = choice.finish_reason; now.ended = performance.now(); }
      redraw();
    }
    if (reason === "length") now.note = "cut at the most tokens";
    if (!reason) now.error = "the answer broke off";
  } catch (error) {
    if (error.name === "AbortError") now.note = "stopped";
    else now.error = error.message;
  }
  now.comes = false;
  now.ended ||= performance.now();
  now.first ||= now.ended;
  writing = null;
  mine = "";
  turnTo(false);
  if (talk[at] === now) again(at);
  $("tell").textContent = now.error ? "" : now.note === "stopped" ? "The answer was stopped." : "The answer is complete.";
}
function turnTo(comes) {
  const stays = document.activeElement === (comes ? $("send") : $("stop"));
  $("send").hidden = comes;
  $("stop").hidden = !comes;
  if (stays) (comes ? $("stop") : $("say")).focus();
}

// ---- what a person does

function grow() { const say = $("say"); say.style.height = "auto"; say.style.height = Math.min(say.scrollHeight + 2, innerHeight * 0.34) + "px"; }
function send() {
  const text = $("say").value;
  if (!text.trim() || writing) return;
  if (!schema.problem) { $("say").value = ""; grow(); talk.push({ role: "user", text }); }
  answer(talk.length);
}
$("compose").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("say").addEventListener("input", grow);
$("say").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
$("stop").addEventListener("click", () => writing && writing.abort());
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && writing && !$("ask-key").open) writing.abort(); });
$("new").addEventListener("click", () => { if (writing) writing.abort(); talk.length = 0; edits = -1; whole(); $("say").focus(); });
for (const one of document.querySelectorAll(".tries button")) one.addEventListener("click", () => { $("say").value = one.textContent; send(); });

turned();
marks();
if ($("schema").value) judge();
readModels();
poll();
