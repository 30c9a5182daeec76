/** Which lane a track is shown in. Knows no screen.
 *
 * A track keeps its lane while any runs; when none does, lanes that became empty close up. A lane whose track has ended
 * is left alone for a while, so that one can read how it ended; the one that ended first is taken first. There are at
 * least `least` lanes, and up to `most` while more are needed. Where all are taken, a track waits for a lane; one that
 * ends before it has any is not shown.
 */

const REST_SECONDS = 1.2;

export class Lanes {
  constructor(least, most) {
    Object.assign(this, { least, most });
    this.clear();
  }

  clear() {
    this.rows = Array.from({ length: this.least }, () => []); // the tracks of each lane, the latest last
    this.placed = new Set();
    this.hidden = 0; // active tracks without a lane
  }

  /** Gives the tracks, which are in the order of their beginnings, their lanes. */
  place(tracks) {
    this.#forget(new Set(tracks));
    this.hidden = 0;
    for (const track of tracks) if (!this.placed.has(track)) this.#try(track);
  }

  #try(track) {
    const row = this.#free();
    const since = row ? freeSince(row) : Infinity;
    const found =
      since < track.from - REST_SECONDS ? row : (this.#added() ?? (since <= track.from || track.isActive ? row : null));
    if (found) {
      found.push(track);
      this.placed.add(track);
    } else {
      this.hidden += track.isActive ? 1 : 0;
    }
  }

  /** The lane that has been free for the longest time. */
  #free() {
    const free = this.rows.filter((row) => !row.at(-1)?.isActive);
    return free.reduce((best, row) => (best && freeSince(best) <= freeSince(row) ? best : row), null);
  }

  #added() {
    if (this.rows.length >= this.most) return null;
    this.rows.push([]);
    return this.rows.at(-1);
  }

  #forget(tracks) {
    const stays = (track, index, row) => tracks.has(track) && (!track.isActive || index === row.length - 1);
    this.rows = this.rows.map((row) => row.filter(stays)); // one that goes on behind another one gets another lane
    this.placed = new Set(this.rows.flat());
    if (![...this.placed].some((track) => track.isActive)) this.#closeUp();
    while (this.rows.length > this.least && this.rows.at(-1).length === 0) this.rows.pop();
  }

  /** Else the latest requests of many stand far below, out of sight. */
  #closeUp() {
    const full = this.rows.filter((row) => row.length);
    this.rows = [...full, ...Array.from({ length: Math.max(0, this.least - full.length) }, () => [])];
  }
}

const freeSince = (row) => row.at(-1)?.to ?? -Infinity;
