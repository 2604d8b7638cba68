import type { Palette, Rgb } from './palette.ts';

// Eight colours that people with any kind of colour blindness tell apart, by hue or by lightness; whoever comes after them
// has the same ones with a dashed line.
const LIGHT: readonly Rgb[] = [
  [0, 114, 178],
  [230, 159, 0],
  [0, 140, 100],
  [204, 121, 167],
  [86, 180, 233],
  [120, 94, 70],
  [98, 92, 160],
  [95, 103, 115],
];
const DARK: readonly Rgb[] = [
  [64, 156, 222],
  [240, 186, 60],
  [25, 186, 140],
  [226, 150, 194],
  [160, 216, 248],
  [190, 156, 122],
  [164, 156, 220],
  [165, 172, 184],
];

/** The colour of the rank at this place among those that are shown; a faint one as long as it has no place (-1). */
export function rankColour(place: number, palette: Palette): Rgb {
  if (place < 0) return palette.faint;
  const colours = palette.dark ? DARK : LIGHT;
  return colours[place % colours.length];
}

/** Lengths of dashes for the line of a rank; none for the first eight. */
export function rankDash(place: number): number[] {
  return [[], [6, 3], [2, 2], [8, 3, 2, 3]][Math.floor(Math.max(0, place) / LIGHT.length) % 4];
}
