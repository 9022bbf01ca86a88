"use strict";
// What the theme leaves out for those who use a keyboard or a screen reader: a name for the search, and code and tables
// that scroll can be reached by Tab.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
const reachable = () => {
  for (const box of document.querySelectorAll(".md-typeset pre > code, .md-typeset__scrollwrap")) {
    if (box.scrollWidth > box.clientWidth) box.setAttribute("tabindex", "0");
    else box.removeAttribute("tabindex");
  }
};
addEventListener("load", reachable);
addEventListener("resize", reachable);
