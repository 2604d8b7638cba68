import type { Strip, Strips } from '../draw/raster.ts';
import type { Lane } from '../model/store.ts';
import type { Group, Groups } from '../model/viewport.ts';

const HEADING = 22;
const SMALLEST = 4;
/** Height of a lane of a collapsed host. */
const SMALL = 3;

/** A lane's place. Pixels of the page from the top of the lanes; the strip is in pixels of the screen. */
export interface Box extends Strip {
  y: number;
  height: number;
  /** One of a collapsed host: has no texts. */
  small: boolean;
}

/** A host's place. */
export interface Heading {
  group: Group;
  y: number;
  height: number;
}

/** Where lanes and hosts lie. */
export class Arrangement implements Strips {
  readonly strips: readonly Box[];
  readonly headings: readonly Heading[];
  readonly rows: number;
  readonly height: number;
  /** Distance of lanes that are not collapsed. */
  readonly pitch: number;
  private readonly boxes = new Map<Lane, Box>();

  /** Fits lanes into `room` pixels of the page, of which each has `ratio` on the screen. No lane is higher than `highest`. */
  constructor(groups: Groups, room: number, ratio: number, highest: number) {
    const { all, several } = groups;
    const number = (collapsed: boolean) => all.reduce((sum, group) => sum + (group.collapsed === collapsed || (!collapsed && !several) ? group.lanes.length : 0), 0);
    const open = Math.max(1, number(false));
    const rest = several ? room - all.length * HEADING - number(true) * SMALL : room;
    this.pitch = Math.max(SMALLEST, Math.min(highest, Math.floor(rest / open)));
    const pitch = Math.round(this.pitch * ratio);
    const gap = pitch >= 20 ? Math.max(2, Math.round(pitch * 0.12)) : pitch >= 6 ? 1 : 0;
    const late = pitch >= 10 ? Math.max(2, Math.round(pitch * 0.14)) : 0;
    const strips: Box[] = [];
    const headings: Heading[] = [];
    let row = 0;
    for (const group of all) {
      if (several) {
        headings.push({ group, y: row / ratio, height: HEADING });
        row += Math.round(HEADING * ratio);
      }
      const small = several && group.collapsed;
      const step = small ? Math.round(SMALL * ratio) : pitch;
      for (const lane of group.lanes) {
        const rows = small ? step : pitch - gap;
        strips.push({ lane, row, rows, late: small ? 0 : late, y: row / ratio, height: rows / ratio, small });
        row += step;
      }
      if (small) row += Math.round(3 * ratio);
    }
    this.strips = strips;
    this.headings = headings;
    this.rows = row;
    this.height = row / ratio;
    for (const box of strips) this.boxes.set(box.lane, box);
  }

  box(lane: Lane): Box | undefined {
    return this.boxes.get(lane);
  }

  laneAt(y: number): Lane | null {
    return this.strips.find(box => y >= box.y && y < box.y + Math.max(box.height, box.small ? 0 : this.pitch))?.lane ?? null;
  }

  headingAt(y: number): Heading | null {
    return this.headings.find(heading => y >= heading.y && y < heading.y + heading.height) ?? null;
  }
}
