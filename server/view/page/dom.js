/** Elements of the page. Text is set as text: nothing that comes from elsewhere is ever read as HTML. */

export const byId = (id) => document.getElementById(id);

/** A new element. Properties are set as they are; `data`, `aria` and `on` are collections. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  const { data = {}, aria = {}, on = {}, ...plain } = properties;
  Object.assign(made, plain);
  Object.assign(made.dataset, data);
  for (const [name, value] of Object.entries(aria)) made.setAttribute(`aria-${name}`, value);
  for (const [name, listener] of Object.entries(on)) made.addEventListener(name, listener);
  made.append(...children);
  return made;
}

/** Sets an element's text where it has changed, so that nothing is laid out in vain. */
export function write(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Shows what went wrong, or hides the place for it. */
export function tellProblem(place, text) {
  place.hidden = !text;
  write(place, text ?? "");
}

export const isCalm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** Whether the inside of the engines is shown, and with it their own words. */
export const isExact = () => byId("inside").open;

/** A button that copies what `read` gives. Browsers give a clipboard to pages from https and localhost alone. */
export function copyButton(read) {
  const button = element("button", { type: "button", className: "quiet", hidden: !navigator.clipboard }, "Copy");
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(read());
    write(button, "Copied");
  });
  return button;
}
