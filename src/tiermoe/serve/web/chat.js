"use strict";
// Messages: of the user { role, content, files }, of the model { role, model, content, thought, note, error, unfinished }

const unfolded = new WeakSet(); // messages whose thought is shown

function showThread() {
  const empty = make("p", { id: "empty" }, "Ask something. What is said stays in this browser.");
  const shown = current.messages.map((message, index) => message.role === "user" ? userArticle(message, index) : modelArticle(message));
  by("thread").replaceChildren(...(shown.length ? shown : [empty]));
  by("as-markdown").disabled = by("as-json").disabled = !shown.length;
}

// Runs what makes the thread longer; the end stays in sight where it was.
function followed(change) {
  const thread = by("thread"), atEnd = thread.scrollHeight - thread.scrollTop - thread.clientHeight < 60;
  change();
  if (atEnd) thread.scrollTop = thread.scrollHeight;
}

function action(text, onclick, ariaLabel = null) {
  return make("button", { type: "button", className: "small", onclick, ariaLabel, disabled: answering !== null }, text);
}

function userArticle(message, index) {
  const edit = action("Edit", () => editMessage(article, message, index), "Edit message: " + message.content.slice(0, 60));
  const files = (message.files || []).map(({ name, text }) =>
    make("details", {}, make("summary", {}, name), make("pre", { tabIndex: 0 }, text)));
  const article = make("article", { className: "user", ariaLabel: "You" }, ...files,
    make("div", { className: "text" }, message.content), make("div", { className: "more" }, edit));
  return article;
}

function leaveEdit() {
  showThread();
  by("message").focus();
}

function editMessage(article, message, index) {
  const text = make("textarea", { value: message.content, ariaLabel: "Your message" });
  const form = make("form", {}, text, make("div", { className: "more" },
    make("button", { className: "main" }, "Send again"),
    make("button", { type: "button", onclick: leaveEdit }, "Cancel"),
    make("span", { className: "note" }, "What follows it is replaced.")));
  form.onsubmit = (event) => {
    event.preventDefault();
    if (!text.value.trim() && !message.files?.length || answering) return;
    current.messages.splice(index);
    send(text.value, message.files);
  };
  text.onkeydown = (event) => {
    if (event.key === "Escape") leaveEdit();
    sendByEnter(event, form);
  };
  article.replaceChildren(form);
  text.focus();
}

function modelArticle(message) {
  const article = make("article", { className: "assistant", ariaLabel: "The model" });
  const thought = make("div", { className: "text" }, message.thought);
  const summary = make("summary", {}, "Thought"), details = make("details", { hidden: !message.thought }, summary, thought);
  details.open = unfolded.has(message);
  details.ontoggle = () => details.open ? unfolded.add(message) : unfolded.delete(message);
  const text = make("div", { className: "markdown" });
  article.append(make("div", { className: "who" }, message.model || "The model"), details, text);
  if (answering?.message === message) showGrowth(message, article, details, thought, text);
  else article.append(...ended(message, text));
  return article;
}

// Shows an answer that comes, from what is there of it.
function showGrowth(message, article, details, thought, text) {
  const more = growing(text, followed);
  article.classList.add("under-way");
  more(message.content);
  answering.show = (part, added) => followed(() => {
    details.hidden = !message.thought;
    details.firstChild.textContent = message.content ? "Thought" : "Thinking …";
    if (part === "thought") thought.append(added);
    else more(added);
  });
}

// The elements below an answer's text, which is filled.
function ended(message, text) {
  text.append(rendered(marked.lexer(message.content)));
  const note = message.note || (message.unfinished && !message.error ? "Interrupted: the page was left while this answer came." : "");
  const more = make("div", { className: "more" });
  if (message.content) more.append(copyButton(() => message.content, "Copy the answer"));
  if (current.messages.at(-1) === message) {
    if (message.unfinished && (message.content || message.thought)) more.append(action("Continue", () => answerAgain(message)));
    more.append(action("Answer again", () => answerAgain()));
  }
  more.append(make("span", { className: "note" }, note));
  return message.error ? [make("div", { className: "error", role: "alert" }, message.error), more] : [more];
}

// Asking

function send(content, files = []) {
  current.messages.push({ role: "user", content, ...(files.length && { files }) });
  answer();
}

// Puts another answer in the place of the last one. begun: what is there of it, which the server continues.
function answerAgain(begun) {
  if (answering) return;
  current.messages.pop();
  answer(begun);
}

function requestBody({ messages, settings }) {
  const last = messages.at(-1); // the answer, as far as it is there
  const said = messages.filter((each) => each.role === "user" || each.content || each === last && each.thought).map((each) => ({
    role: each.role, content: withFiles(each), ...(each.thought && { reasoning_content: each.thought }),
  }));
  const body = {
    model,
    messages: settings.system ? [{ role: "system", content: settings.system }, ...said] : said,
    stream: true,
    stream_options: { include_usage: true },
    return_progress: true,
  };
  for (const name of ["temperature", "top_p", "max_completion_tokens"]) if (settings[name]) body[name] = Number(settings[name]);
  return body;
}

async function answer({ content, thought } = { content: "", thought: "" }) {
  const conversation = current, message = { role: "assistant", model, content, thought };
  const run = { conversation, message, controller: new AbortController(), show: () => {}, dropped: false };
  conversation.messages.push(message);
  message.unfinished = true; // also where the page is closed before the end
  answering = run;
  notice("");
  showState("Waiting for the first token …");
  keep();
  showList();
  showThread();
  by("thread").scrollTop = by("thread").scrollHeight;
  by("message").focus();
  try {
    message.note = await readAnswer(run);
  } catch (error) {
    if (run.controller.signal.aborted) message.note = "Stopped.";
    else {
      message.error = error instanceof TypeError ? "The connection was lost while the answer came." : error.message;
      connect();
    }
  }
  keep();
  answering = null;
  showState(message.unfinished ? "The answer is not whole." : "Answered.");
  showList();
  if (conversation === current) followed(showThread);
}

// Keeps what came of the answer under way.
function keep() {
  if (answering && !answering.dropped) save(answering.conversation);
}

addEventListener("pagehide", () => {
  keep();
  if (answering) answering.dropped = true; // what the end of the connection does to it is not kept
});

// Reads an answer to its end; what is to be noted below it.
async function readAnswer({ conversation, message, controller }) {
  const options = { method: "POST", body: JSON.stringify(requestBody(conversation)), signal: controller.signal };
  const response = await ask("v1/chat/completions", options);
  let first = 0, finish = null, usage = null, keptAt = performance.now();
  for await (const data of events(response)) {
    if (data === "[DONE]") {
      if (finish !== "length") delete message.unfinished;
      const seconds = (performance.now() - first) / 1000;
      return (finish === "length" ? "Cut off: the most tokens were reached. " : "") + usageText(usage, seconds);
    }
    const { choices = [], error, usage: used, prompt_progress: progress } = JSON.parse(data);
    if (error) throw new Error(sentence(error.message));
    usage = used ?? usage;
    finish = choices[0]?.finish_reason ?? finish;
    if (progress && !first) showState("Reading the prompt: " + short(progress.processed) + " of " + short(progress.total) + " tokens …");
    for (const [part, more] of [["thought", choices[0]?.delta?.reasoning_content], ["content", choices[0]?.delta?.content]]) {
      if (!more) continue;
      showState(part === "thought" ? "Thinking …" : "Answering …");
      first ||= performance.now();
      message[part] += more;
      answering.show(part, more);
    }
    if (performance.now() - keptAt > 1000) {
      keep();
      keptAt = performance.now();
    }
  }
  throw new TypeError("the stream has no end");
}

function usageText(usage, seconds) {
  if (!usage) return "";
  const speed = usage.completion_tokens > 1 && seconds > 0 ? ", " + short((usage.completion_tokens - 1) / seconds) + " a second" : "";
  const cached = usage.prompt_tokens_details?.cached_tokens;
  return counted(usage.completion_tokens, "token") + speed + (cached ? "; " + cached + " of the prompt were kept" : "") + ".";
}

function showState(text) {
  setText("status", text);
  by("send").hidden = answering !== null;
  by("stop").hidden = answering === null;
}

function stop() {
  answering?.controller.abort();
  by("message").focus();
}

// The form

let attached = []; // files { name, text } of the message that is written

function sendByEnter(event, form) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
}

function fitHeight() {
  by("message").style.height = "";
  by("message").style.height = Math.max(by("message").scrollHeight + 2, 42) + "px";
}

function attach(files) {
  attached = files;
  by("attached").replaceChildren(...attached.map((file) => {
    const onclick = () => attach(attached.filter((each) => each !== file));
    return make("li", {}, file.name, make("button", { type: "button", ariaLabel: "Remove file: " + file.name, onclick }, "×"));
  }));
  by("message").focus();
}

// Adds the texts of files, as far as a conversation has room for them: 12 bytes a token, as the server counts.
async function addFiles(files) {
  const refused = [], added = [...attached];
  let room = 12 * context - added.reduce((sum, { text }) => sum + new Blob([text]).size, 0);
  for (const file of files) {
    const text = file.size <= room ? await textOf(file) : null;
    if (file.size > room) refused.push(file.name + " has " + bytes(file.size) + ", a conversation has room for " + bytes(room) + " more.");
    else if (text === null) refused.push(file.name + " is no text in UTF-8.");
    else {
      added.push({ name: file.name, text });
      room -= file.size;
    }
  }
  attach(added);
  notice(refused.join(" "), true);
}

async function textOf(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

by("compose").onsubmit = (event) => {
  event.preventDefault();
  const text = by("message").value, files = attached;
  if (!text.trim() && !files.length || answering) return;
  by("message").value = "";
  attach([]);
  fitHeight();
  send(text, files);
};
by("message").onkeydown = (event) => sendByEnter(event, by("compose"));
by("message").oninput = fitHeight;
by("stop").onclick = stop;
by("below").onkeydown = (event) => {
  if (event.key === "Escape") stop();
};
by("attach").onclick = () => by("files").click();
by("files").onchange = async () => {
  await addFiles(by("files").files);
  by("files").value = "";
};

// Settings of a conversation, as they are typed; an empty one is the model's

function showSettings() {
  for (const field of by("settings").elements) field.value = current.settings[field.name] || "";
}

by("settings").onsubmit = (event) => event.preventDefault();
by("settings").onchange = ({ target }) => {
  if (!target.reportValidity()) return;
  current.settings[target.name] = target.value;
  localStorage.setItem(SETTINGS, JSON.stringify(current.settings));
  if (current.messages.length) save(current);
};
by("adjust").onclick = () => {
  by("settings").hidden = !by("settings").hidden;
  by("adjust").ariaExpanded = String(!by("settings").hidden);
};
