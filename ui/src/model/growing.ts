/**
 * How much room a lane's columns have at first: lanes get rows alike, and what doubles should not do so in all of them
 * in the same frame.
 */
export function roomAtFirst(rank: number): number {
  return 256 + 16 * (rank % 16);
}

/** Grows a typed array to hold at least `size` elements, keeping what is in it. */
export function grown<T extends Float64Array | Float32Array | Uint32Array | Uint16Array | Uint8Array>(array: T, size: number): T {
  if (array.length >= size) return array;
  const Make = array.constructor as new (length: number) => T;
  const bigger = new Make(Math.max(size, array.length * 2));
  bigger.set(array as never);
  return bigger;
}
