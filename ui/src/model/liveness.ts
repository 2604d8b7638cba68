/** Whether the kernel can be heard: not now, or never more. */
export type Link = 'here' | 'away' | 'ended';

/** State of a view's kernel: it speaks, has not spoken for too long, can't be reached now, or has ended. */
export type Standing = 'live' | 'silent' | 'away' | 'ended';

/** While a cell runs, the kernel sends something at least every two seconds (`HEARTBEAT` in widgets/recording_feed.py). */
export const SILENCE = 5000; // ms

/** Monitor of the kernel's messages, by which a view knows whether it is up to date. */
export class Liveness {
  private readonly changed: () => void;
  private readonly again: () => void;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private link: Link = 'here';
  private silent = false;
  private runs = false;
  private last = Date.now();

  /**
   * `changed` is called when the standing has changed, but not from within `heard`'s caller's own update if it did not.
   * `again` is called when the kernel can be heard again: messages that it sent meanwhile are lost.
   */
  constructor(changed: () => void, again: () => void = () => undefined) {
    this.changed = changed;
    this.again = again;
  }

  get standing(): Standing {
    return this.link !== 'here' ? this.link : this.silent ? 'silent' : 'live';
  }

  /** When the last news came, in ms as `Date.now()` has it. */
  get at(): number {
    return this.last;
  }

  /** News came; only while something `runs` the next must come soon. */
  heard(runs: boolean): void {
    this.last = Date.now();
    this.wait(runs);
  }

  /** From now on news must come, although none has: the page was opened, and shows what was saved. */
  wait(runs = true): void {
    const before = this.standing;
    this.runs = runs;
    this.silent = false;
    this.arm();
    if (this.standing !== before) this.changed();
  }

  /** The connection has changed. A kernel that has ended does not come back: another one knows nothing of the view. */
  connected(link: Link): void {
    if (link === this.link || this.link === 'ended') return;
    const back = link === 'here';
    this.link = link;
    // Silence before the connection was lost does not count against the kernel.
    this.silent = false;
    this.arm();
    this.changed();
    if (back) this.again();
  }

  dispose(): void {
    clearTimeout(this.timer);
  }

  private arm(): void {
    clearTimeout(this.timer);
    if (!this.runs || this.link !== 'here') return;
    this.timer = setTimeout(() => {
      this.silent = true;
      this.changed();
    }, SILENCE);
  }
}
