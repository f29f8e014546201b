"use strict";
// Markdown of answers: marked makes HTML of it, highlight.js of code, and DOMPurify leaves of that what MARKS names

const MARKS = {
  ALLOWED_TAGS: ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "del", "code", "pre", "blockquote",
    "ul", "ol", "li", "input", "table", "thead", "tbody", "tr", "th", "td", "a", "span"],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class", "type", "checked", "disabled"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ["start", "align", "type"], // attributes that are no address
  RETURN_DOM_FRAGMENT: true,
};
const MOST_COLOURED = 20000; // characters of code; some of highlight.js's expressions take quadratic time

const escaped = (text) => text.replace(/[&<>"']/g, (sign) => "&#" + sign.charCodeAt(0) + ";");

marked.use({
  renderer: {
    html: ({ text }) => escaped(text), // tags of an answer are shown, as a part of its text
    image: ({ href, text }) => '<a href="' + escaped(href) + '">' + escaped(text || href) + "</a>", // loading it would tell its server
  },
});

// The elements of Markdown blocks, as marked's lexer gives them. coloured: code in its colours; it is not while it grows.
function rendered(blocks, coloured = true) {
  const fragment = DOMPurify.sanitize(marked.parser(blocks), MARKS);
  for (const link of fragment.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const table of fragment.querySelectorAll("table")) wrap(table, "wide");
  for (const pre of fragment.querySelectorAll("pre")) {
    const code = pre.firstElementChild, language = code.className.replace("language-", "");
    if (coloured) highlight(code, language);
    const button = copyButton(() => pre.textContent, "Copy code");
    wrap(pre, "block").prepend(make("div", { className: "language" }, make("span", {}, language), button));
    pre.tabIndex = 0; // a long line is scrolled with the arrow keys
  }
  return fragment;
}

function highlight(code, language) {
  const text = code.textContent;
  if (text.length > MOST_COLOURED || !hljs.getLanguage(language)) return;
  code.replaceChildren(DOMPurify.sanitize(hljs.highlight(text, { language, ignoreIllegals: true }).value, MARKS));
}

function wrap(element, className) {
  const box = make("div", { className });
  element.replaceWith(box);
  box.append(element);
  return box;
}

// Shows a text that grows: the function takes what is new of it. Whole blocks are rendered once, the last block again with
// each frame, and for at most a fifth of the time. around: called with what renders.
function growing(element, around) {
  let text = "", shown = 0, whole = 0, last = [], waiting = false; // whole: characters of the blocks that are rendered for good
  function render() {
    const blocks = marked.lexer(text.slice(whole));
    const finished = blocks.slice(0, Math.max(0, openFrom(blocks)));
    for (const node of last) node.remove();
    element.append(rendered(finished));
    last = [...rendered(blocks.slice(finished.length), false).childNodes];
    element.append(...last);
    for (const block of finished) whole += block.raw.length;
    shown = text.length;
  }
  return async (more) => {
    text += more.replaceAll("\r", ""); // the lexer counts line breaks as one character
    if (waiting) return;
    waiting = true;
    while (shown < text.length) {
      await new Promise(requestAnimationFrame);
      const began = performance.now();
      around(render);
      await sleep(4 * (performance.now() - began));
    }
    waiting = false;
  };
}

// The first block that more text may change: the last one, and a list before it that its line may go on with, like “2.”.
function openFrom(blocks) {
  const last = blocks.findLastIndex((block) => block.type !== "space");
  const before = blocks.findLastIndex((block, index) => index < last && block.type !== "space");
  return blocks[before]?.type === "list" && !blocks[last].raw.includes("\n") ? before : last;
}

function copyButton(text, label) {
  const button = make("button", { type: "button", className: "small", ariaLabel: label }, "Copy");
  button.onclick = async () => {
    button.textContent = await copied(text()) ? "Copied" : "Not copied";
    setTimeout(() => button.textContent = "Copy", 2000);
  };
  return button;
}

// Puts a text on the clipboard; whether it is there.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text); // only for pages over https or of this machine
    return true;
  } catch {
    const focused = document.activeElement, area = make("textarea", { value: text, readOnly: true });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return done;
  }
}
