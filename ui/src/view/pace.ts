/** A frame that took longer than this, in ms, has made the reader wait for the next one. */
const LATE = 25;
/** How many times as long as such a frame nothing is drawn, at least and at most in ms: so that few frames are late. */
const REST = 20;
const LONGEST = 450;
const MOST = 8;
const TRUSTED = 8;

/**
 * How many pictures may be drawn in a frame, and when. What a script gives to a canvas takes most of its time after the
 * script has ended, so only the length of whole frames tells what it costs.
 */
export class Pace {
  /** Pictures in one frame. */
  most = 2;
  private until = 0;
  private good = 0;

  /** Whether it is time for more; times in ms. */
  ready(now: number): boolean {
    return now >= this.until;
  }

  /** The frame in which something was drawn lasted `ms`. */
  told(ms: number, now: number): void {
    if (ms <= LATE) {
      if (++this.good < TRUSTED) return;
      this.good = 0;
      this.most = Math.min(MOST, this.most + 1);
      return;
    }
    this.good = 0;
    this.most = Math.max(1, this.most >> 1);
    this.until = now + Math.min(LONGEST, REST * ms);
  }

  /** Nothing moves any more: draw what there is. */
  hurry(): void {
    this.until = 0;
  }
}
