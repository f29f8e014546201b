"use strict";
// Conversations: each under a key of its own, so that two windows keep both of theirs

const PREFIX = "tiermoe:conversation:", SETTINGS = "tiermoe:settings";
const OPEN = "tiermoe:open"; // which one this window shows, also after a reload
let current = newConversation(); // { id, changed, messages, settings }
let answering = null; // { conversation, message, controller, show, dropped }

// A new conversation, with the settings that were entered last.
function newConversation() {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
  return { id, changed: 0, messages: [], settings: JSON.parse(localStorage.getItem(SETTINGS) || "{}") };
}

function load(id) {
  try {
    const read = JSON.parse(localStorage.getItem(PREFIX + id));
    return Array.isArray(read?.messages) ? { settings: {}, ...read } : null;
  } catch {
    return null; // not ours
  }
}

function loadAll() {
  const names = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  const loaded = names.map((name) => load(name.slice(PREFIX.length))).filter(Boolean);
  return loaded.sort((one, other) => other.changed - one.changed);
}

function save(conversation) {
  conversation.changed = Date.now();
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
  } catch {
    notice("This browser has no room for more conversations: delete one, or this one is lost with the page.", true);
  }
}

const searchedText = ({ files = [], content }) => [...files.flatMap(({ name, text }) => [name, text]), content].join("\n");
const titleOf = ({ messages: [first] }) => first && (first.content || first.files[0].name).slice(0, 60) || "New conversation";

function showList() {
  const wanted = by("search").value.trim().toLowerCase();
  const found = loadAll().filter((each) => each.messages.some((message) => searchedText(message).toLowerCase().includes(wanted)));
  by("none").hidden = !wanted || found.length > 0;
  by("conversations").replaceChildren(...found.map((each) => {
    const title = titleOf(each);
    const ariaCurrent = each.id === current.id ? "true" : null;
    const open = make("button", { type: "button", title, ariaCurrent, onclick: () => show(each) }, title);
    const remove = make("button", { type: "button", ariaLabel: "Delete conversation: " + title, onclick: () => forget(each) }, "×");
    return make("li", {}, open, remove);
  }));
}

function show(conversation) {
  current = answering?.conversation.id === conversation.id ? answering.conversation : conversation;
  sessionStorage.setItem(OPEN, current.id);
  openMenu(false);
  showList();
  showSettings();
  showThread();
  by("thread").scrollTop = by("thread").scrollHeight;
  by("message").focus();
}

function forget(conversation) {
  if (!confirm("Delete the conversation “" + titleOf(conversation) + "”?")) return;
  if (answering?.conversation.id === conversation.id) {
    answering.dropped = true;
    answering.controller.abort();
  }
  localStorage.removeItem(PREFIX + conversation.id);
  if (conversation.id === current.id) return show(newConversation());
  showList();
  by("new").focus(); // the button that had the focus is gone
}

// The list of conversations in a narrow window.
function openMenu(open) {
  by("chat").classList.toggle("listed", open);
  by("menu").ariaExpanded = String(open);
}

by("menu").onclick = () => openMenu(!by("chat").classList.contains("listed"));
by("new").onclick = () => show(newConversation());
by("search").oninput = showList;
addEventListener("storage", (event) => {
  showList();
  const changed = event.key === PREFIX + current.id && answering?.conversation !== current && load(current.id);
  if (!changed || document.querySelector("article form")) return;
  current = changed; // another window goes on with it
  showThread();
});

// Export

function download(extension, type, text) {
  const name = titleOf(current).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "conversation";
  const address = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: address, download: name + extension }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}

function asMarkdown({ messages, settings }) {
  const parts = messages.map((message) => (message.role === "user" ? "## You" : "## The model") + "\n\n" + withFiles(message));
  if (settings.system) parts.unshift("## System\n\n" + settings.system);
  return parts.join("\n\n") + "\n";
}

// A message as one text: its files in code blocks, before what was written.
function withFiles({ files = [], content }) {
  return [...files.map(({ name, text }) => name + ":\n" + fenced(text)), content].filter(Boolean).join("\n\n");
}

function fenced(text) {
  const runs = text.match(/`+/g) || [];
  const fence = "`".repeat(runs.reduce((longest, run) => Math.max(longest, run.length + 1), 3));
  return fence + "\n" + text + (text.endsWith("\n") ? "" : "\n") + fence;
}

by("as-markdown").onclick = () => download(".md", "text/markdown", asMarkdown(current));
by("as-json").onclick = () => download(".json", "application/json", JSON.stringify({ model, ...current }, null, 2));
