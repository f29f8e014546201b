"use strict";
// Conversations: each under a key of its own, so that two windows keep both of theirs

const PREFIX = "tiermoe:conversation:", SETTINGS = "tiermoe:settings";
const OPEN = "tiermoe:open"; // which one this window shows, also after a reload
const ROLES = { system: "System", user: "You", assistant: "The model" };
let current = fresh(); // { id, changed, messages, settings }
let answering = null; // { conversation, message, controller, show, dropped }

// A new conversation, with the settings that were entered last.
function fresh() {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
  return { id, changed: 0, messages: [], settings: JSON.parse(localStorage.getItem(SETTINGS) || "{}") };
}

function kept(id) {
  try {
    const read = JSON.parse(localStorage.getItem(PREFIX + id));
    return Array.isArray(read?.messages) ? { settings: {}, ...read } : null;
  } catch {
    return null; // not ours
  }
}

function saved() {
  const names = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  const found = names.map((name) => kept(name.slice(PREFIX.length))).filter(Boolean);
  return found.sort((one, other) => other.changed - one.changed);
}

function save(conversation) {
  conversation.changed = Date.now();
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
  } catch {
    notice("This browser has no room for more conversations: delete one, or this one is lost with the page.", true);
  }
}

const textOf = (message) => [...(message.files || []).flatMap(({ name, text }) => [name, text]), message.content].join("\n");
const titleOf = ({ messages: [first] }) => first && (first.content || first.files[0].name).slice(0, 60) || "New conversation";

function showList() {
  const wanted = by("search").value.trim().toLowerCase();
  const found = saved().filter((each) => each.messages.some((message) => textOf(message).toLowerCase().includes(wanted)));
  by("none").hidden = !wanted || found.length > 0;
  by("conversations").replaceChildren(...found.map((each) => {
    const title = titleOf(each);
    const open = make("button", { type: "button", onclick: () => show(each) }, title);
    const remove = make("button", { type: "button", title: "Delete", onclick: () => forget(each) }, "×");
    remove.ariaLabel = "Delete conversation: " + title;
    const here = each.id === current.id;
    if (here) open.ariaCurrent = "true";
    return make("li", { className: here ? "current" : "" }, open, remove);
  }));
}

function show(conversation) {
  current = answering?.conversation.id === conversation.id ? answering.conversation : conversation;
  sessionStorage.setItem(OPEN, current.id);
  list(false);
  showList();
  showSettings();
  showThread();
  by("thread").scrollTop = by("thread").scrollHeight;
  by("said").focus();
}

function forget(conversation) {
  if (!confirm("Delete the conversation “" + titleOf(conversation) + "”?")) return;
  if (answering?.conversation.id === conversation.id) {
    answering.dropped = true;
    answering.controller.abort();
  }
  localStorage.removeItem(PREFIX + conversation.id);
  if (conversation.id === current.id) return show(fresh());
  showList();
  by("new").focus(); // the button that had the focus is gone
}

function list(shown) {
  by("chat").classList.toggle("listed", shown);
  by("menu").ariaExpanded = String(shown);
}

by("menu").addEventListener("click", () => list(!by("chat").classList.contains("listed")));
by("new").addEventListener("click", () => show(fresh()));
by("search").addEventListener("input", showList);
addEventListener("storage", (event) => {
  showList();
  const changed = event.key === PREFIX + current.id && answering?.conversation !== current && kept(current.id);
  if (!changed || document.querySelector("article form")) return;
  current = changed; // another window goes on with it
  showThread();
});

// Export

function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}

function asMarkdown({ messages, settings }) {
  const parts = messages.map((message) => "## " + ROLES[message.role] + "\n\n" + written(message));
  if (settings.system) parts.unshift("## " + ROLES.system + "\n\n" + settings.system);
  return parts.join("\n\n") + "\n";
}

// A message as one text: its files in code blocks, before what was written.
function written({ files = [], content }) {
  return [...files.map(({ name, text }) => name + ":\n" + fenced(text)), content].filter(Boolean).join("\n\n");
}

function fenced(text) {
  const runs = text.match(/`+/g) || [];
  const fence = "`".repeat(runs.reduce((longest, run) => Math.max(longest, run.length + 1), 3));
  return fence + "\n" + text + (text.endsWith("\n") ? "" : "\n") + fence;
}

const fileName = () => titleOf(current).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "conversation";
by("as-markdown").addEventListener("click", () => download(fileName() + ".md", "text/markdown", asMarkdown(current)));
by("as-json").addEventListener("click", () => download(fileName() + ".json", "application/json", JSON.stringify({ model, ...current }, null, 2)));
