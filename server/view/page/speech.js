/** The box for speech: files that are dropped, and the microphone. */

import { ask, keep, kept, newRequestName, reasonOf } from "./api.js";
import { byId, copyButton, element, tellProblem, write } from "./dom.js";
import { eventsOf } from "./event_reader.js";
import { plural, seconds, subtitles } from "./format.js";
import { Microphone } from "./microphone.js";
import { offer } from "./models.js";

const MOST_TRANSCRIPTS = 50;
const UNKNOWN = "The models of the server are not known yet: it is not connected, or asks for an API key.";
const LINES_PLACE = "triolet-transcripts";

/** A line in the list of transcripts; one of a file plays it, too. */
class Line {
  constructor(list, name, { stop = null, file = null } = {}) {
    this.text = element("p", { className: "text" });
    this.state = element("span", { className: "state" });
    this.stop = element("button", { type: "button", className: "quiet", aria: { label: `Stop ${name}` } }, "Stop");
    this.stop.hidden = !stop;
    if (stop) this.stop.addEventListener("click", stop);
    this.actions = element("span", { className: "ends" }, this.stop);
    this.head = element("p", { className: "of" }, element("b", { title: name }, name), this.state, this.actions);
    [this.name, this.pieces, this.warnings] = [name, [], []]; // pieces: those of the text whose times are known
    this.item = element("li", {}, this.head, this.text);
    if (file) this.#play(file);
    list.prepend(this.item);
    while (list.children.length > MOST_TRANSCRIPTS) drop(list.lastElementChild);
  }

  /** A line that was kept: its recording is gone. */
  static recall(list, { name, text, state, pieces, warnings }) {
    const line = new Line(list, name);
    line.pieces = pieces;
    write(line.text, text);
    line.warn(warnings);
    line.#close(state);
  }

  /** The player is shown when the browser has found that it can play the file. */
  #play(file) {
    const src = URL.createObjectURL(file);
    this.player = element("audio", { controls: true, preload: "metadata", src, hidden: true, ariaLabel: file.name });
    this.player.addEventListener("loadedmetadata", () => (this.player.hidden = false));
    this.player.addEventListener("timeupdate", () => this.#mark(this.player.currentTime));
    this.text.addEventListener("click", ({ target }) => this.#playFrom(target));
    this.text.before(this.player);
  }

  /** Adds a piece of text. Its words show when they are said, and play the recording from there on. */
  add({ delta, words = [], start, end }) {
    let done = 0;
    if (end !== undefined) this.pieces.push({ start, end, text: delta });
    for (const { word, start, end } of words) {
      const at = delta.indexOf(word, done);
      if (at < 0) continue;
      const times = { start, end };
      const title = `${start.toFixed(2)} to ${end.toFixed(2)} s`;
      this.text.append(delta.slice(done, at), element("span", { className: "word", title, data: times }, word));
      done = at + word.length;
    }
    this.text.append(delta.slice(done));
  }

  #playFrom(target) {
    if (target.dataset.start === undefined) return;
    this.player.currentTime = Number(target.dataset.start);
    this.player.play();
  }

  #mark(now) {
    for (const word of this.text.querySelectorAll(".word"))
      word.classList.toggle("now", Number(word.dataset.start) <= now && now < Number(word.dataset.end));
  }

  /** Shows sentences about what was not done as asked. */
  warn(warnings) {
    this.warnings.push(...warnings);
    this.item.append(...warnings.map((each) => element("p", { className: "hint warning" }, each)));
  }

  /** Keeps the line, but for one that failed: its file can be chosen again. */
  end(state, fault = null) {
    this.#close(state);
    if (fault !== null) {
      this.player?.remove();
      this.item.append(element("p", { className: "problem", role: "alert" }, fault));
      return;
    }
    const { name, pieces, warnings } = this;
    const line = { name, state, pieces, warnings, text: this.text.textContent };
    if (line.text) keep(LINES_PLACE, [...kept(LINES_PLACE), line].slice(-MOST_TRANSCRIPTS));
  }

  #close(state) {
    this.item.className = "over";
    this.stop.hidden = true;
    write(this.state, state);
    if (this.text.textContent) {
      this.actions.append(copyButton(() => this.text.textContent.trim()), ...this.#subtitles());
    }
  }

  #subtitles() {
    if (!this.pieces.length) return [];
    const href = URL.createObjectURL(new Blob([subtitles(this.pieces)], { type: "application/x-subrip" }));
    const download = `${this.name.replace(/\.\w+$/, "")}.srt`;
    return [element("a", { className: "quiet", href, download, title: "Download as subtitles" }, "SRT")];
  }
}

/** Removes a line, and lets go of its recording and subtitles. */
function drop(item) {
  for (const { src, href } of item.querySelectorAll("audio, a")) URL.revokeObjectURL(src ?? href);
  item.remove();
}

export class Speech {
  /** `failed` is told the model, the id of the request and the reason of a failure. */
  constructor(models, failed) {
    [this.models, this.failed] = [models, failed];
    for (const name of ["drop", "file", "list", "model", "microphone", "level", "problem", "clear"])
      this[name] = byId(`speech-${name}`);
    models.listeners.push((all) => offer(this.model, all, "transcribe"));
    this.file.addEventListener("change", () => this.#takeAll(this.file));
    this.microphone.addEventListener("click", () => this.#toggle());
    this.clear.addEventListener("click", () => this.#forget());
    takeDrops(this.drop, (files) => this.#transcribeAll(files));
    for (const one of kept(LINES_PLACE)) Line.recall(this.list, one);
  }

  #forget() {
    keep(LINES_PLACE, []);
    for (const item of this.list.querySelectorAll(".over")) drop(item);
  }

  #takeAll(input) {
    this.#transcribeAll([...input.files]);
    input.value = "";
  }

  #transcribeAll(files) {
    tellProblem(this.problem, this.model.value ? null : UNKNOWN);
    if (this.model.value) for (const file of files) this.#transcribe(file);
  }

  async #transcribe(file) {
    const control = new AbortController();
    const line = new Line(this.list, file.name, { stop: () => control.abort(), file });
    const [id, model] = [newRequestName(file.name), this.model.value];
    const begun = performance.now();
    write(line.state, "transcribing");
    try {
      const text = await this.#read({ file, model, id, signal: control.signal, line });
      if (line.text.textContent !== text) write(line.text, text);
      const sign = line.warnings.length ? `, ${plural(line.warnings.length, "warning")}` : "";
      if (!text) line.warn(["No speech was found."]);
      line.end(`took ${seconds((performance.now() - begun) / 1000)}${sign}`);
    } catch (error) {
      const reason = reasonOf(error);
      line.end(reason === null ? "stopped" : "failed", reason);
      if (reason !== null) this.failed(model, id, reason);
    }
  }

  async #read({ file, model, id, signal, line }) {
    const form = new FormData();
    form.append("file", file);
    form.append("model", model);
    form.append("stream", "true");
    const hasWords = this.models.models?.get(model)?.can?.includes("words");
    for (const each of ["segment", ...(hasWords ? ["word"] : [])]) form.append("timestamp_granularities[]", each);
    const headers = { "x-request-id": id };
    const response = await ask("v1/audio/transcriptions", { method: "POST", body: form, headers, signal });
    for await (const told of eventsOf(response)) {
      if (told.type === "transcript.text.delta") line.add(told);
      if (told.type === "error") throw Object.assign(new Error(told.error.message), { name: "Told" });
      if (told.type === "transcript.text.done") {
        if (told.warnings) line.warn(told.warnings);
        return told.text;
      }
    }
    throw Object.assign(new Error("the answer was cut off"), { name: "Told" });
  }

  // -- the microphone ------------------------------------------------------------------------------------------------

  async #toggle() {
    tellProblem(this.problem, null);
    if (this.speaking) return this.#listenTo(null);
    const line = new Line(this.list, "Microphone");
    write(line.state, "listening");
    const microphone = this.#microphoneFor(line);
    this.#listenTo(microphone);
    try {
      await microphone.start();
    } catch (error) {
      tellProblem(this.problem, `The microphone cannot be used: ${error.message}`);
      line.item.remove();
      if (this.speaking === microphone) this.#listenTo(null);
    }
  }

  #microphoneFor(line) {
    const microphone = new Microphone({
      model: this.model.value,
      heard: (item, text, provisional) => hear(line.text, item, text, provisional),
      level: (share) => (this.level.value = share),
      failed: (reason) => tellProblem(this.problem, reason),
      ended: () => {
        line.end("");
        if (this.speaking === microphone) this.#listenTo(null);
      },
    });
    return microphone;
  }

  /** Listens to this microphone from now on; to none where it is null. */
  #listenTo(microphone) {
    this.speaking?.stop();
    this.speaking = microphone;
    this.microphone.setAttribute("aria-pressed", String(microphone !== null));
    write(this.microphone, microphone ? "Stop" : "Speak");
    this.level.hidden = !microphone;
  }
}

/** Writes an utterance into the text: what is certain, and what may still change. */
function hear(place, item, text, provisional) {
  let part = place.querySelector(`[data-item="${CSS.escape(item)}"]`);
  if (!part) place.append((part = element("span", { data: { item } })));
  part.replaceChildren(text.trimStart(), element("span", { className: "running" }, provisional), " ");
}

/** Has `take` get the files that are dropped on `place`. */
export function takeDrops(place, take) {
  const over = (isOver) => place.classList.toggle("over", isOver);
  place.addEventListener("dragover", (event) => {
    event.preventDefault();
    over(true);
  });
  place.addEventListener("dragleave", () => over(false));
  place.addEventListener("drop", (event) => {
    event.preventDefault();
    over(false);
    take([...event.dataTransfer.files]);
  });
}
