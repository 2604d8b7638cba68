import type { MembershipState } from './membership.ts';
import { readPoints, type Definition } from './series.ts';
import { readRows, type Failure, type RankRow, type Mark, type Store } from './store.ts';

/** Model that anywidget hands to a widget's script, as far as it is used here. */
export interface Model {
  get(name: string): unknown;
  on(event: string, act: (...args: never[]) => void): void;
  off(event: string, act?: (...args: never[]) => void): void;
  send(content: unknown): void;
  /** The page's manager of widgets, whatever that is. */
  widget_manager?: unknown;
}

const MARKS_KEPT = 4000;
/** After this time (ms) the answer to a question counts as lost; after each further one, twice as long. */
export const ASK_AGAIN = 5000;
const ASK_SELDOM = 60_000;

interface Message {
  type: string;
  /** The kernel dropped the rows between `after` and `from`; a view with all rows below `after` misses none. */
  after: number;
  /** Number of the first row of this message. */
  from: number;
  count: number;
  namesFrom: number;
  names: string[];
  /** Where each of the names is used: `cell [7] line 4`, or nothing if it is not known. */
  sites: string[];
  marks: [number, Mark][];
  /** The user cleared the rows below this number; views must drop them. */
  cleared: number;
  /** Spans that no page can have: they never came to the kernel, or could not be sent. */
  lost: number;
  clockErrors: [number, number][];
  seriesFrom: number;
  series: Definition[];
  /** The second buffer has this many points: all from this number to below that one that exist. */
  points: number;
  pointsFrom: number;
  pointsTo: number;
  pointsLost: number;
  /** Only if they have changed. */
  ranks?: RankRow[];
  heading?: string;
  membership?: MembershipState;
  failures?: Failure[];
}

/** Receiver of the kernel's rows. It drops repeated rows: the kernel repeats them until this page acknowledges. */
export class Stream {
  private next = 0;
  private cleared = 0;
  /** Rows that were dropped before they could be sent to this page; those that were cleared do not count. */
  private missed = 0;
  /** From when on lacking rows are asked for again, as `Date.now()` has it, and how long the question after that waits. */
  private askAt = 0;
  private patience = ASK_AGAIN;
  private readonly store: Store;
  private readonly model: Model;

  constructor(store: Store, model: Model) {
    this.store = store;
    this.model = model;
  }

  hello(): void {
    this.model.send({ type: 'hello', since: this.next, points: this.store.series.next });
  }

  /** Returns whether something has changed. */
  receive(message: Message, buffers: DataView[]): boolean {
    const { store } = this;
    if (message.cleared > this.cleared) {
      this.cleared = message.cleared;
      this.missed = 0;
      if (this.next) store.clear();
    }
    if (message.ranks) store.ranks = message.ranks;
    if (message.membership) store.membership = message.membership;
    if (message.heading !== undefined) store.heading = message.heading;
    if (message.failures) store.failures = message.failures;
    message.names.forEach((name, i) => (store.names[message.namesFrom + i] = name));
    message.sites.forEach((site, i) => (store.sites[message.namesFrom + i] = site));
    for (const [rank, error] of message.clockErrors) store.clockError.set(rank, error);
    for (const [number, mark] of message.marks) store.marks.set(number, mark);
    for (const number of store.marks.keys()) {
      if (store.marks.size <= MARKS_KEPT) break;
      store.marks.delete(number);
    }
    const { from, count } = message;
    if (message.after > this.next || message.pointsFrom > store.series.next || message.seriesFrom > store.series.all.length) {
      // Rows were lost on the way. Ask for them once, since the answer holds all rows that follow as well.
      this.ask();
      return false;
    }
    // Counted here, since the kernel sends one page what others have or have not.
    this.missed += Math.max(0, from - Math.max(this.next, this.cleared));
    store.lostBefore = message.lost + this.missed;
    store.series.define(message.seriesFrom, message.series);
    store.series.lostBefore = message.pointsLost;
    store.series.append(readPoints(copied(buffers[1]), message.points), message.pointsFrom, message.pointsTo);
    [this.askAt, this.patience] = [0, ASK_AGAIN];
    if (from + count > this.next && count) {
      const rows = readRows(copied(buffers[0]), count);
      const known = Math.max(0, Math.min(count, this.next - from));
      store.append(known ? tail(rows, known) : rows);
      this.next = from + count;
      return true;
    }
    this.next = Math.max(this.next, from);
    store.version++;
    return true;
  }

  /** Say hello, unless the answer to the hello before may still come: it can be lost as well. */
  private ask(): void {
    const now = Date.now();
    if (now < this.askAt) return;
    this.askAt = now + this.patience;
    this.patience = Math.min(2 * this.patience, ASK_SELDOM);
    this.hello();
  }
}

/** Return a buffer that is aligned for the typed arrays. */
function copied(view: DataView): ArrayBuffer {
  return view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength) as ArrayBuffer;
}

function tail<T extends ReturnType<typeof readRows>>(rows: T, known: number): T {
  const columns = Object.entries(rows).map(([name, column]) => [name, typeof column === 'number' ? column - known : (column as Float64Array).subarray(known)]);
  return Object.fromEntries(columns) as T;
}
