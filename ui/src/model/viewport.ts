const SHORTEST = 200; // ns

/** Which stretch of time is seen, and whether it moves along with what comes. */
export class Viewport {
  from = 0;
  to = 1e9;
  following = true;
  /** How much is seen while following. */
  span = 5e9;
  private begin = 0;
  private end = 0;

  get length(): number {
    return this.to - this.from;
  }

  /** The same as a stretch whose end does not belong to it: what ends with the view, as the newest does while following, is seen. */
  get seen(): [number, number] {
    return [this.from, this.to + 1];
  }

  /** What there is to see; moves the view if it follows. Returns whether it moved. */
  data(begin: number, end: number): boolean {
    this.begin = begin;
    this.end = end;
    if (!this.following) return false;
    return this.set(Math.min(Math.max(begin, end - this.span), end - SHORTEST), end);
  }

  set(from: number, to: number): boolean {
    if (to - from < SHORTEST) {
      const middle = (from + to) / 2;
      from = middle - SHORTEST / 2;
      to = middle + SHORTEST / 2;
    }
    const moved = from !== this.from || to !== this.to;
    this.from = from;
    this.to = to;
    return moved;
  }

  /** Makes the view `factor` times as long around `at`. */
  zoom(factor: number, at = (this.from + this.to) / 2): void {
    const everything = Math.max(SHORTEST, (this.end - this.begin) * 1.1);
    const length = Math.min(Math.max(this.length * factor, SHORTEST), everything);
    if (this.following) {
      this.span = length;
      this.set(this.end - length, this.end);
      return;
    }
    const share = (at - this.from) / this.length;
    this.clamp(at - length * share, length);
  }

  pan(by: number): void {
    this.following = false;
    this.clamp(this.from + by, this.length);
  }

  fit(): void {
    this.following = false;
    const margin = (this.end - this.begin) * 0.01;
    this.set(this.begin - margin, this.end + margin);
  }

  toBegin(): void {
    this.show(this.begin, this.begin + this.length);
  }

  toEnd(): void {
    this.show(this.end - this.length, this.end);
  }

  /** The beginning and the end of what there is. */
  get extent(): [number, number] {
    return [this.begin, this.end];
  }

  show(from: number, to: number): void {
    this.following = false;
    this.set(from, to);
  }

  follow(on: boolean): void {
    this.following = on;
    if (on) {
      this.span = Math.min(Math.max(this.length, 1e6), 60e9);
      this.data(this.begin, this.end);
    }
  }

  /** At least a quarter of the view stays over what there is. */
  private clamp(from: number, length: number): void {
    const least = this.begin - length * 0.75;
    const most = this.end - length * 0.25;
    from = Math.min(Math.max(from, least), Math.max(least, most));
    this.set(from, from + length);
  }
}
