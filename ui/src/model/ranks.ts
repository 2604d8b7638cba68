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
  /** Whether others waited for it notably longer than for any other rank: see {@link slowestOf}. */
  slowest?: boolean;
  worst: number;
  /** Shares of the last seconds, 0 to 1. */
  wait: number;
  work: number;
  bandwidth: number;
}

/** The row of a rank whose kernel has ended: no rank is there any more, as widgets/rank_rows.py says where the kernel could. */
export function endedRow(row: RankRow): RankRow {
  const there = ['starting', 'running', 'idle'].includes(row.state);
  return there ? { ...row, state: 'ended', cell: '', paused: '' } : row;
}

// The same as in collectives/tracing/rank_activity.py, so that no view names a rank that another one does not.
const NOTABLE = 0.05;
const TIMES_THE_NEXT = 2;

/**
 * The rank that slows the others down: they waited for it for 5 % of a stretch of time at least, and twice as long as for any other.
 * `null` where no rank stands out: between equal ranks, who was waited for longest is chance.
 */
export function slowestOf<T extends { readonly heldUp: number }>(ranks: readonly T[], length: number): T | null {
  const [first, next] = [...ranks].sort((a, b) => b.heldUp - a.heldUp);
  if (!first || !(first.heldUp > 0) || first.heldUp < length * NOTABLE) return null;
  return first.heldUp >= TIMES_THE_NEXT * (next?.heldUp ?? 0) ? first : null;
}
