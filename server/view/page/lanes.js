/** Which lane a track is shown in. Knows no screen.
 *
 * A track keeps its lane. A lane whose track has ended is left alone for a while, so that one can read how it ended; the
 * one that ended first is taken first. There are at least `least` lanes, and more, up to `most`, while more are needed.
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

  /** Gives the tracks their lanes. */
  place(tracks, now) {
    this.#forget(new Set(tracks));
    this.hidden = 0;
    for (const track of tracks) if (!this.placed.has(track)) this.#try(track, now);
  }

  #try(track, now) {
    const row = this.#rested(now) ?? this.#added() ?? this.#free();
    if (!row) {
      this.hidden += track.isActive ? 1 : 0;
      return;
    }
    row.push(track);
    this.placed.add(track);
  }

  #rested(now) {
    const row = this.#free();
    return row && (row.length === 0 || row.at(-1).to < now - REST_SECONDS) ? row : null;
  }

  /** The lane that has been free for the longest time. */
  #free() {
    const since = (row) => row.at(-1)?.to ?? -Infinity;
    const free = this.rows.filter((row) => !row.at(-1)?.isActive);
    return free.reduce((best, row) => (best && since(best) <= since(row) ? best : row), null);
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
    while (this.rows.length > this.least && this.rows.at(-1).length === 0) this.rows.pop();
  }
}
