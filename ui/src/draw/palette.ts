/** A colour as red, green and blue, 0 to 255. */
export type Rgb = readonly [number, number, number];

export interface Palette {
  dark: boolean;
  background: Rgb;
  lane: Rgb;
  grid: Rgb;
  text: Rgb;
  faint: Rgb;
  wait: Rgb;
  late: Rgb;
  failed: Rgb;
  selected: Rgb;
  kinds: readonly Rgb[];
}

// Kinds of collectives in colours of Okabe and Ito, which people with any kind of colour blindness tell apart; the vermilion
// is kept for what is late. Lightness differs as well, and each has a name in the legend and on the spans.
const LIGHT: Palette = {
  dark: false,
  background: [255, 255, 255],
  lane: [246, 247, 249],
  grid: [226, 229, 234],
  text: [32, 37, 46],
  faint: [104, 112, 125],
  wait: [193, 201, 214],
  late: [213, 94, 0],
  failed: [20, 20, 20],
  selected: [0, 0, 0],
  kinds: [
    [0, 114, 178],
    [0, 158, 115],
    [204, 121, 167],
    [86, 180, 233],
    [230, 159, 0],
    [98, 92, 140],
    [140, 140, 140],
    [140, 140, 140],
    [120, 94, 70],
    [190, 70, 130],
    [70, 130, 60],
    [0, 96, 104],
  ],
};

const DARK: Palette = {
  dark: true,
  background: [17, 17, 17],
  lane: [27, 29, 33],
  grid: [48, 52, 59],
  text: [226, 229, 235],
  faint: [149, 157, 170],
  wait: [71, 80, 97],
  late: [255, 122, 41],
  failed: [245, 245, 245],
  selected: [255, 255, 255],
  kinds: [
    [64, 156, 222],
    [25, 186, 140],
    [219, 143, 187],
    [142, 208, 245],
    [240, 186, 60],
    [150, 142, 200],
    [160, 160, 160],
    [160, 160, 160],
    [176, 146, 116],
    [226, 110, 170],
    [120, 180, 110],
    [96, 190, 196],
  ],
};

export function css(colour: Rgb, alpha = 1): string {
  return `rgba(${colour[0]},${colour[1]},${colour[2]},${alpha})`;
}

export function packed(colour: Rgb): number {
  return ((255 << 24) | (colour[2] << 16) | (colour[1] << 8) | colour[0]) >>> 0;
}

/** `share` of `over`, the rest of `under`. */
export function mixed(over: Rgb, under: Rgb, share: number): Rgb {
  return [0, 1, 2].map(i => Math.round(over[i] * share + under[i] * (1 - share))) as unknown as Rgb;
}

function luminance(colour: Rgb): number {
  return (0.2126 * colour[0] + 0.7152 * colour[1] + 0.0722 * colour[2]) / 255;
}

/** The palette that fits a background. */
export function paletteFor(background: Rgb): Palette {
  const dark = luminance(background) < 0.5;
  const base = dark ? DARK : LIGHT;
  return { ...base, background, lane: mixed(base.text, background, dark ? 0.055 : 0.035), grid: mixed(base.text, background, 0.12) };
}

// Eight colours that people with any kind of colour blindness tell apart, by hue or by lightness; ranks after the eighth
// have the same ones with a dashed line.
const RANKS_ON_LIGHT: readonly Rgb[] = [
  [0, 114, 178],
  [230, 159, 0],
  [0, 140, 100],
  [204, 121, 167],
  [86, 180, 233],
  [120, 94, 70],
  [98, 92, 160],
  [95, 103, 115],
];
const RANKS_ON_DARK: readonly Rgb[] = [
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
  const colours = palette.dark ? RANKS_ON_DARK : RANKS_ON_LIGHT;
  return colours[place % colours.length];
}

/** Lengths of dashes for the line of a rank; none for the first eight. */
export function rankDash(place: number): number[] {
  return [[], [6, 3], [2, 2], [8, 3, 2, 3]][Math.floor(Math.max(0, place) / RANKS_ON_LIGHT.length) % 4];
}
