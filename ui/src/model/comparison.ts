import type { NameStatistics, RankStatistics, Statistics } from './statistics.ts';

/** The same tensor, called at the same place, in two stretches of time. */
export interface ComparedName {
  name: string;
  kind: string;
  site: string;
  a: NameStatistics | null;
  b: NameStatistics | null;
}

export interface ComparedRank {
  rank: number;
  a: RankStatistics | null;
  b: RankStatistics | null;
}

export interface Comparison {
  a: Statistics;
  b: Statistics;
  /** Those whose total time differs most come first. */
  names: ComparedName[];
  ranks: ComparedRank[];
}

export function compare(a: Statistics, b: Statistics): Comparison {
  const names = new Map<string, ComparedName>();
  const ranks = new Map<number, ComparedRank>();
  for (const [of, side] of [[a, 'a'], [b, 'b']] as const) {
    for (const one of of.names) {
      const key = [one.kind, one.name, one.site].join('\0');
      const both = names.get(key) ?? { name: one.name, kind: one.kind, site: one.site, a: null, b: null };
      both[side] = one;
      names.set(key, both);
    }
    for (const one of of.ranks) {
      const both = ranks.get(one.rank) ?? { rank: one.rank, a: null, b: null };
      both[side] = one;
      ranks.set(one.rank, both);
    }
  }
  const difference = (one: ComparedName) => Math.abs((one.b?.total ?? 0) - (one.a?.total ?? 0));
  return {
    a,
    b,
    names: [...names.values()].sort((x, y) => difference(y) - difference(x)),
    ranks: [...ranks.values()].sort((x, y) => x.rank - y.rank),
  };
}
