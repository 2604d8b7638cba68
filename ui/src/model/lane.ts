import { grown, roomAtFirst } from './growing.ts';
import { Track } from './track.ts';

/** Columns of the rows of one rank, in the order in which it recorded them; times in ns, the later ones since arrival. */
export class Lane {
  readonly rank: number;
  n = 0;
  /** Rows that were here once and were forgotten. */
  dropped = 0;
  arrival: Float64Array;
  nbytes: Float64Array;
  ready: Float32Array;
  started: Float32Array;
  finished: Float32Array;
  name: Uint32Array;
  op: Uint32Array;
  kind: Uint8Array;
  flags: Uint8Array;
  /** What the executor did; what this rank waited for others; what others waited for this rank. */
  readonly work: Track;
  readonly wait: Track;
  readonly late: Track;

  constructor(rank: number) {
    this.rank = rank;
    const room = roomAtFirst(rank);
    [this.arrival, this.nbytes] = [new Float64Array(room), new Float64Array(room)];
    [this.ready, this.started, this.finished] = [new Float32Array(room), new Float32Array(room), new Float32Array(room)];
    [this.name, this.op] = [new Uint32Array(room), new Uint32Array(room)];
    [this.kind, this.flags] = [new Uint8Array(room), new Uint8Array(room)];
    [this.work, this.wait, this.late] = [new Track(room), new Track(room, false), new Track(room, false)];
  }

  private columns() {
    return [this.arrival, this.nbytes, this.ready, this.started, this.finished, this.name, this.op, this.kind, this.flags];
  }

  reserve(more: number): void {
    const size = this.n + more;
    if (this.arrival.length >= size) return;
    this.arrival = grown(this.arrival, size);
    this.nbytes = grown(this.nbytes, size);
    this.ready = grown(this.ready, size);
    this.started = grown(this.started, size);
    this.finished = grown(this.finished, size);
    this.name = grown(this.name, size);
    this.op = grown(this.op, size);
    this.kind = grown(this.kind, size);
    this.flags = grown(this.flags, size);
  }

  /** Forgets everything. */
  clear(): void {
    this.dropped += this.n;
    this.n = 0;
    for (const track of [this.work, this.wait, this.late]) track.clear();
  }

  /** Forgets the oldest `count` rows and what was drawn of them. */
  drop(count: number): void {
    const k = Math.min(count, this.n);
    if (!k) return;
    const time = this.arrival[k - 1] + this.finished[k - 1];
    for (const column of this.columns()) column.copyWithin(0, k, this.n);
    this.n -= k;
    this.dropped += k;
    for (const track of [this.work, this.wait, this.late]) track.dropBefore(time);
  }
}
