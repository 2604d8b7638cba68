import { firstAbove, grown } from './tracks.ts';

/** Points that one rank reports under one name. */
export interface Definition {
  rank: number;
  name: string;
  /** `s`, `B`, `B/s`, `1/s`, `%`, `1` for shares, or empty if it is not known. */
  unit: string;
}

/** One message of points, each column an array of the same length. Times in ns since the origin. */
export interface Points {
  count: number;
  time: Float64Array;
  value: Float64Array;
  step: Float64Array;
  series: Uint32Array;
  /** How much greater than the first one's a point's number is. */
  number: Uint32Array;
}

export const POINT_BYTES = 32;

/** Takes the columns out of one buffer, in which they lie one after the other. */
export function readPoints(buffer: ArrayBuffer, count: number): Points {
  if (buffer.byteLength !== count * POINT_BYTES) throw new Error(`${buffer.byteLength} bytes are not ${count} points`);
  return {
    count,
    time: new Float64Array(buffer, 0, count),
    value: new Float64Array(buffer, 8 * count, count),
    step: new Float64Array(buffer, 16 * count, count),
    series: new Uint32Array(buffer, 24 * count, count),
    number: new Uint32Array(buffer, 28 * count, count),
  };
}

/** The newest points of one rank under one name, by time. */
export class Series implements Definition {
  readonly rank: number;
  readonly name: string;
  readonly unit: string;
  n = 0;
  /** Points that were here once and were forgotten. */
  dropped = 0;
  time = new Float64Array(64);
  value = new Float64Array(64);
  step = new Float64Array(64);

  constructor({ rank, name, unit }: Definition) {
    this.rank = rank;
    this.name = name;
    this.unit = unit;
  }

  /** Puts a point where its time belongs, or in the place of the one that has the same. */
  put(time: number, value: number, step: number): void {
    let at = this.n;
    if (at && time <= this.time[at - 1]) {
      at = firstAbove(this.time, time, 0, this.n);
      while (at && this.time[at - 1] === time) at--;
    }
    if (at === this.n || this.time[at] !== time) {
      this.time = grown(this.time, this.n + 1);
      this.value = grown(this.value, this.n + 1);
      this.step = grown(this.step, this.n + 1);
      for (const column of [this.time, this.value, this.step]) column.copyWithin(at + 1, at, this.n);
      this.n++;
    }
    this.time[at] = time;
    this.value[at] = value;
    this.step[at] = step;
  }

  drop(count: number): void {
    for (const column of [this.time, this.value, this.step]) column.copyWithin(0, count, this.n);
    this.n -= count;
    this.dropped += count;
  }

  /** Index of the last point at or before a time; -1 if there is none. */
  before(time: number): number {
    return firstAbove(this.time, time, 0, this.n) - 1;
  }

  /** Index of the point that is nearest to a time; -1 if there is none. */
  nearest(time: number): number {
    const after = firstAbove(this.time, time, 0, this.n);
    if (!after) return this.n ? 0 : -1;
    return after < this.n && this.time[after] - time < time - this.time[after - 1] ? after : after - 1;
  }
}

const MOST_PER_SERIES = 20_000;
const LEAST_PER_SERIES = 512;

/** All series, in bounded memory: the oldest points of each are forgotten and counted. */
export class SeriesStore {
  readonly all: Series[] = [];
  /** Series of each name, by rank; names in the order in which they came. */
  readonly named = new Map<string, Series[]>();
  readonly limit: number;
  /** Number of the next point. */
  next = 0;
  /** Points that were lost before they came here. */
  lostBefore = 0;
  begin = Infinity;
  end = -Infinity;
  /** Grows with each change. */
  version = 0;

  constructor(limit = 1_000_000) {
    this.limit = limit;
  }

  get count(): number {
    return this.all.reduce((sum, one) => sum + one.n, 0);
  }

  get forgotten(): number {
    return this.all.reduce((sum, one) => sum + one.dropped, 0);
  }

  /** Points that each series may keep now. */
  get room(): number {
    return Math.min(MOST_PER_SERIES, Math.max(LEAST_PER_SERIES, Math.floor(this.limit / Math.max(1, this.all.length))));
  }

  of(rank: number, name: string): Series | undefined {
    return this.named.get(name)?.find(one => one.rank === rank);
  }

  /** Takes in series from number `from` on; those that are known are left as they are. */
  define(from: number, definitions: readonly Definition[]): void {
    definitions.forEach((definition, i) => {
      if (from + i !== this.all.length) return;
      const series = new Series(definition);
      this.all.push(series);
      const same = this.named.get(series.name);
      if (!same) this.named.set(series.name, [series]);
      else same.splice(same.findIndex(one => one.rank > series.rank) >>> 0, 0, series);
      this.version++;
    });
  }

  /** Takes in points whose first number is `from`, as far as they are new, which is all there is up to `to`. */
  append(points: Points, from: number, to: number): void {
    const room = this.room;
    for (let i = 0; i < points.count; i++) {
      const series = this.all[points.series[i]];
      if (!series || from + points.number[i] < this.next) continue;
      const time = points.time[i];
      series.put(time, points.value[i], points.step[i]);
      if (time < this.begin) this.begin = time;
      if (time > this.end) this.end = time;
      if (series.n > room) {
        series.drop(series.n - room + (room >> 4));
        this.begin = Infinity;
      }
    }
    if (this.begin === Infinity) for (const one of this.all) if (one.n && one.time[0] < this.begin) this.begin = one.time[0];
    if (points.count) this.version++;
    this.next = Math.max(this.next, to);
  }
}
