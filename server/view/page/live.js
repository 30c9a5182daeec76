/** Reads `/events` for as long as the page is open, and begins anew where that ends. */

import { ask, Problem } from "./api.js";
import { eventsOf } from "./event_reader.js";

const LONGEST_PAUSE = 8000;
const SHORTEST_PAUSE = 500;

/** `take` gets each event; `tell(state, text)` hears how the connection is; `needKey` gives a promise of a key. */
export async function follow({ take, tell, needKey }) {
  for (let pause = SHORTEST_PAUSE; ; pause = Math.min(LONGEST_PAUSE, pause * 2)) {
    const came = await readOnce(take, tell, needKey);
    if (came) pause = SHORTEST_PAUSE / 2;
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

/** Whether anything came. */
async function readOnce(take, tell, needKey) {
  let came = false;
  try {
    for await (const told of eventsOf(await ask("events"))) {
      if (!came) tell("live", "live");
      came = true;
      take(told);
    }
    tell("lost", "the server stopped");
  } catch (error) {
    if (error instanceof Problem && error.status === 401) await needKey(error.message);
    else tell("lost", error instanceof Problem ? error.message : "no connection, trying again");
  }
  return came;
}
