/** Server-sent events (WHATWG HTML, section 9.2), from a stream of bytes: fetch can send a key, EventSource cannot. */

/** Cuts text into the data of events. A part of an event is kept until the rest comes. */
export class EventCutter {
  #rest = "";

  cut(text) {
    const parts = (this.#rest + text).split(/\r?\n\r?\n/);
    this.#rest = parts.pop();
    return parts.map(dataOf).filter((data) => data !== null);
  }
}

function dataOf(part) {
  const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.length ? lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n") : null;
}

/** The events of an answer, as objects, until it ends; `[DONE]` is not told. */
export async function* eventsOf(response) {
  const cutter = new EventCutter();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      for (const data of cutter.cut(part.value)) if (data !== "[DONE]") yield JSON.parse(data);
    }
  } finally {
    reader.cancel().catch(() => {}); // the answer may have failed already: its error is on its way
  }
}
