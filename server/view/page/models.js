/** The models: what state each is in, and which of them are shown. */

import { byId, element, isExact, write } from "./dom.js";
import { bytes } from "./format.js";

export class Models {
  constructor(changed) {
    this.changed = changed;
    this.place = byId("models");
    this.chips = new Map();
    this.left = new Set(); // the models that are not shown
    this.listeners = [];
  }

  shown = (name) => !this.left.has(name);

  update(models) {
    this.models = models;
    for (const name of models.keys()) if (!this.chips.has(name)) this.#add(name);
    for (const [name, model] of models) this.#write(this.chips.get(name), model);
    for (const listener of this.listeners) listener(models);
  }

  #add(name) {
    const [label, state] = [element("span", { className: "name" }, name), element("span", { className: "state" })];
    const chip = element("button", { type: "button", className: "chip", aria: { pressed: "true" } }, label, state);
    chip.addEventListener("click", () => this.#toggle(name, chip));
    this.chips.set(name, { chip, state });
    this.place.append(chip);
  }

  #toggle(name, chip) {
    if (!this.left.delete(name)) this.left.add(name);
    chip.setAttribute("aria-pressed", String(this.shown(name)));
    this.changed();
  }

  #write({ chip, state }, model) {
    const told = stateOf(model);
    write(state, told === "absent" && !isExact() ? "not loaded" : told);
    chip.dataset.state = told;
    const { about, error } = model;
    const what = about
      ? `${about.architecture} on ${about.device}, ${about.dtype}, ${bytes(model.bytes)}`
      : "not loaded";
    chip.title = error ? `${what}\n${error}` : what;
  }
}

function stateOf({ state, engine }) {
  return state === "ready" && engine && engine.power !== "awake" ? engine.power : state;
}

/** Keeps a choice of models: those that can do `what`, then those of which nobody knows yet. Without any, the box that
 * it is in is not shown. */
export function offer(select, models, what) {
  const known = [...models].sort(([, one], [, other]) => !one.can - !other.can);
  const fit = known.filter(([, { can }]) => !can || can.includes(what)).map(([name]) => name);
  select.closest(".card").hidden = !fit.length;
  if (fit.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...fit.map((name) => element("option", { value: name }, name)));
  if (fit.includes(chosen)) select.value = chosen;
}
