"use strict";
const by = (id) => document.getElementById(id);
let key = sessionStorage.getItem("tiermoe:key") || "";
let model = "", context = 0; // its name, and the most tokens of a conversation

// An element; children that are strings are text, never HTML.
function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

// A screen reader does not say again what is there already.
function setText(id, text) {
  if (by(id).textContent !== text) by(id).textContent = text;
}

function notice(text, bad = false) {
  setText("notice", text);
  by("notice").hidden = !text;
  by("notice").classList.toggle("error", bad);
}

// The server

const sleep = (milliseconds) => new Promise((wake) => setTimeout(wake, milliseconds));

async function ask(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = "Bearer " + key;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is it still running?");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  if (response.status === 401) askForKey();
  const why = body?.error?.message || "the server answered with status " + response.status;
  throw Object.assign(new Error(sentence(why)), { body });
}

const sentence = (text) => text[0].toUpperCase() + text.slice(1) + ".";

function askForKey() {
  if (!by("key-form").hidden) return;
  by("key-form").hidden = false;
  by("key").value = key;
  by("key").focus();
}

// The data of a stream's events, as they come.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6).trim();
  }
}

async function untilLoaded() {
  for (;; await sleep(1000)) {
    try {
      return await ask("health");
    } catch (error) {
      const { status, progress } = error.body ?? {};
      if (status !== "loading") notice(error.message, true);
      else notice("The model is being loaded" + (progress ? ": " + progressText(progress) : "") + " …");
    }
  }
}

const progressText = ({ what, done, total }) => what + (total ? ", " + Math.floor(100 * done / total) + " %" : "");

let connecting = false;

// Waits for the server and asks for its models: at first, and after an answer that failed, as it may be another server.
async function connect() {
  if (connecting) return;
  connecting = true;
  await untilLoaded();
  connecting = false;
  notice("");
  try {
    const { data } = await (await ask("v1/models")).json();
    chooseModel(data.find(({ id }) => id === model) ?? data.find(({ status }) => status?.value === "loaded") ?? data[0]);
    by("models").replaceChildren(...data.map(({ id }) => make("option", { selected: id === model }, id)));
    by("models").hidden = data.length < 2;
    by("models").onchange = () => chooseModel(data.find(({ id }) => id === by("models").value));
    by("key-form").hidden = true;
  } catch (error) {
    notice(error.message, true);
  }
}

function chooseModel({ id, max_model_len }) {
  [model, context] = [id, max_model_len];
  by("model").textContent = model;
  document.title = model + " – tiermoe";
  [samples, rates, selected] = [[], null, null]; // of the experts' view
}

by("key-form").onsubmit = (event) => {
  event.preventDefault();
  key = by("key").value;
  sessionStorage.setItem("tiermoe:key", key);
  by("key-form").hidden = true;
  connect();
};
