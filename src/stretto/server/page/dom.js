// A few words for building elements. Text only ever goes in as text.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children, which are elements or text. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svgElement(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** The element of this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** A copy of what a template holds, which is one element. */
export function copyOf(templateId) {
  return byId(templateId).content.firstElementChild.cloneNode(true);
}

/** Sets a text only where it is another, so that nothing is laid out anew for nothing. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Shows an answer so far, or a thread's text, in a node: one span a piece, kept where unchanged. */
export function setPieces(node, pieces) {
  const spans = node.children;
  let count = 0;
  for (const piece of pieces) {
    const span = spans[count] ?? node.appendChild(document.createElement("span"));
    const lane = piece.cursor ?? piece.lane;
    const kind = piece.cursor ? "cursor" : piece.isGone ? "gone" : "piece";
    const name = `${kind} lane-${lane.colour}`;
    if (span.className !== name) span.className = name;
    setText(span, piece.cursor ? "" : piece.text);
    count += 1;
  }
  while (spans.length > count) spans[count].remove();
}
