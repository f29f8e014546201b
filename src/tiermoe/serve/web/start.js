"use strict";
// The two views, and the beginning

function view() {
  const experts = location.hash === "#experts";
  by("experts").hidden = !experts;
  by("chat").hidden = by("menu").hidden = experts;
  if (!experts) by("thread").scrollTop = by("thread").scrollHeight;  // it may have grown unseen
  for (const link of document.querySelectorAll("header nav a")) {
    link.ariaCurrent = link.hash === (experts ? "#experts" : "#chat") ? "page" : null;
  }
  draw();
}

addEventListener("hashchange", view);
view();
show(load(sessionStorage.getItem(OPEN)) || newConversation());
connect();
watch();
