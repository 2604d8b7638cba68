import { grown } from './tracks.ts';

const LARGEST = 1 << 19;

/**
 * When each rank came to each collective. An operation is one tensor's collective on all of its ranks, by its number.
 *
 * Numbers grow; the newest half a million are kept.
 */
export class Operations {
  private mask = (1 << 10) - 1;
  private ids = new Uint32Array(1 << 10);
  private first = new Float64Array(1 << 10);
  private second = new Float64Array(1 << 10);
  private last = new Float64Array(1 << 10);
  private lastRank = new Uint16Array(1 << 10);
  private count = new Uint16Array(1 << 10);
  private size = new Uint16Array(1 << 10);

  /** Takes an arrival in; true if with it all ranks are there. A size of 0 means that it is not known. */
  arrive(id: number, rank: number, time: number, size: number): boolean {
    let slot = id & this.mask;
    while (this.ids[slot] !== id && this.ids[slot] !== 0 && this.mask + 1 < LARGEST) {
      this.grow();
      slot = id & this.mask;
    }
    if (this.ids[slot] !== id) {
      if (this.ids[slot] > id) return false; // so old that its place is another's
      this.ids[slot] = id;
      this.count[slot] = 0;
      this.first[slot] = Infinity;
      this.second[slot] = this.last[slot] = -Infinity;
      this.size[slot] = size;
    }
    if (time < this.first[slot]) this.first[slot] = time;
    if (time >= this.last[slot]) {
      this.second[slot] = this.last[slot];
      this.last[slot] = time;
      this.lastRank[slot] = rank;
    } else if (time > this.second[slot]) this.second[slot] = time;
    return ++this.count[slot] === this.size[slot] && size > 1;
  }

  private grow(): void {
    const length = (this.mask + 1) * 2;
    const half = this.mask + 1;
    for (const name of ['ids', 'first', 'second', 'last', 'lastRank', 'count', 'size'] as const) (this[name] as Float64Array) = grown(this[name] as Float64Array, length);
    this.mask = length - 1;
    // Each operation stays where it is or goes to the same place in the new half. The place it leaves is initialised when another operation moves in.
    for (let i = 0; i < half; i++) {
      const id = this.ids[i];
      if (!(id & half)) continue;
      const slot = i + half;
      this.ids[slot] = id;
      this.first[slot] = this.first[i];
      this.second[slot] = this.second[i];
      this.last[slot] = this.last[i];
      this.lastRank[slot] = this.lastRank[i];
      this.count[slot] = this.count[i];
      this.size[slot] = this.size[i];
      this.ids[i] = 0;
    }
  }

  /** Return the record of an operation; `undefined` if it has no number or was forgotten. */
  get(id: number): Arrivals | undefined {
    const slot = id & this.mask;
    if (!id || this.ids[slot] !== id) return undefined;
    return {
      first: this.first[slot],
      last: this.last[slot],
      lead: this.last[slot] - this.second[slot],
      lastRank: this.lastRank[slot],
      count: this.count[slot],
      size: this.size[slot],
    };
  }
}

/** Times of the first and the last arrival, and how long after the second last the last rank came. */
export interface Arrivals {
  first: number;
  last: number;
  lead: number;
  lastRank: number;
  count: number;
  size: number;
}
