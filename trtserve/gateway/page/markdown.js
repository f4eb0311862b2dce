"use strict";
/* Markdown as DOM nodes. Text of a model only ever becomes text nodes, so it cannot add markup, scripts or styles. */
function node(name, children = [], attributes = {}) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const INLINE = new RegExp([
  "(?<ticks>`{1,5})(?<code>.+?)\\k<ticks>(?!`)",
  "\\*\\*(?<strong>[^\\s*](?:.*?[^\\s])?)\\*\\*",
  "(?<![\\w*])\\*(?<em>[^\\s*](?:[^*]*[^\\s*])?)\\*(?!\\*)",
  "(?<!\\w)_(?<em_>[^\\s_](?:[^_]*[^\\s_])?)_(?!\\w)",
  "~~(?<del>.+?)~~",
  "\\[(?<label>[^\\]]+)\\]\\((?<target>(?:https?://|mailto:)[^\\s)]+)\\)",
  "(?<bare>https?://[^\\s<>()]+[^\\s<>().,;:!?'\"])",
  "\\\\(?<plain>[\\\\`*_{}\\[\\]()#+.!|~-])",
].join("|"), "s");

function link(target, children) {
  return node("a", children, { href: target, target: "_blank", rel: "noopener noreferrer" });
}

const LONGEST = 8000;  /* characters of a paragraph with markup: the time to look for it grows with their square */

function inline(text) {
  const made = [];
  for (let found; text.length <= LONGEST && (found = INLINE.exec(text)); text = text.slice(found.index + found[0].length))
    made.push(...(found.index ? [text.slice(0, found.index)] : []), marked(found.groups));
  return text ? [...made, text] : made;
}

function marked({ code, strong, em, em_, del, label, target, bare, plain }) {
  if (code !== undefined) return node("code", [code.replace(/^ (.*) $/s, "$1")]);
  if (strong !== undefined) return node("strong", inline(strong));
  if (em !== undefined || em_ !== undefined) return node("em", inline(em ?? em_));
  if (del !== undefined) return node("del", inline(del));
  if (label !== undefined) return link(target, inline(label));
  return bare !== undefined ? link(bare, [bare]) : plain;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*(\S*)/, HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/, RULE = /^ {0,3}([-*_])\s*(?:\1\s*){2,}$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/, QUOTE = /^ {0,3}> ?(.*)$/, ROW = /\|/, DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const DEEPEST = 20;

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll("\\|", "|"));
}

function begins(lines, at) {
  return [FENCE, HEADING, RULE, ITEM, QUOTE].some(kind => kind.test(lines[at])) || isTable(lines, at);
}

function isTable(lines, at) {
  return ROW.test(lines[at]) && at + 1 < lines.length && ROW.test(lines[at + 1]) && DIVIDER.test(lines[at + 1]);
}

/* The blocks of some lines; beyond DEEPEST levels of quotes and lists text stays as it is. */
function blocks(lines, depth = 0) {
  const made = [];
  if (depth > DEEPEST) return [node("p", [lines.join("\n")])];
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    let found;
    if (!line.trim()) at++;
    else if ((found = FENCE.exec(line))) {
      const [, fence, language] = found, code = [];
      for (at++; at < lines.length && !lines[at].trim().match(`^${fence[0]}{${fence.length},}$`); at++) code.push(lines[at]);
      at++;
      made.push(node("pre", [node("code", [code.join("\n")])], language ? { "data-language": language } : {}));
    } else if ((found = HEADING.exec(line))) {
      made.push(node(`h${Math.min(6, found[1].length + 2)}`, inline(found[2])));
      at++;
    } else if (RULE.test(line)) {
      made.push(node("hr"));
      at++;
    } else if (QUOTE.test(line)) {
      const inside = [];
      for (; at < lines.length && QUOTE.test(lines[at]); at++) inside.push(QUOTE.exec(lines[at])[1]);
      made.push(node("blockquote", blocks(inside, depth + 1)));
    } else if (isTable(lines, at)) {
      const row = (name, line) => node("tr", cells(line).map(cell => node(name, inline(cell))));
      const body = [];
      const head = row("th", line);
      for (at += 2; at < lines.length && lines[at].trim() && ROW.test(lines[at]); at++) body.push(row("td", lines[at]));
      made.push(node("div", [node("table", [node("thead", [head]), node("tbody", body)])], { class: "wide" }));
    } else if ((found = ITEM.exec(line))) {
      const ordered = /\d/.test(found[2]), indent = found[1].length, items = [];
      const start = ordered ? { start: parseInt(found[2], 10) } : {};
      while (at < lines.length && (found = ITEM.exec(lines[at])) && found[1].length === indent && /\d/.test(found[2]) === ordered) {
        const inside = [found[3]], width = indent + 2;
        for (at++; at < lines.length; at++) {
          const next = lines[at], deeper = next.length - next.trimStart().length >= width;
          if (next.trim() && !deeper && (ITEM.test(next) || begins(lines, at) || !lines[at - 1].trim())) break;
          inside.push(deeper ? next.slice(Math.min(found[0].length - found[3].length, next.length - next.trimStart().length)) : next);
        }
        items.push(node("li", blocks(inside, depth + 1)));
      }
      made.push(node(ordered ? "ol" : "ul", items, start));
    } else {
      const text = [line];
      for (at++; at < lines.length && lines[at].trim() && !begins(lines, at); at++) text.push(lines[at]);
      made.push(node("p", inline(text.join("\n"))));
    }
  }
  return made;
}

function markdown(text) {
  return blocks(text.replaceAll("\r\n", "\n").split("\n"));
}
