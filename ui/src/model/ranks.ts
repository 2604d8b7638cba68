/** One rank as the kernel tells of it; times in ns. */
export interface RankRow {
  rank: number;
  host: string;
  pid: number;
  plane: string;
  state: string;
  reason: string;
  cell: string;
  /** Why it waits for its user: `at a prompt`; empty or missing if it does not. */
  paused?: string;
  spans: number;
  timesLast: number;
  heldUp: number;
  worst: number;
  /** Shares of the last seconds, 0 to 1. */
  wait: number;
  work: number;
  bandwidth: number;
}
