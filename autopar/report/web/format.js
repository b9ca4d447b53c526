// Numbers as text, as `autopar.units` writes them.

export function seconds(value) {
  if (value >= 100) return `${Math.round(value).toLocaleString('en')} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  if (value >= 1e-3) return `${(value * 1e3).toFixed(2)} ms`;
  return value > 1e-9 ? `${(value * 1e6).toFixed(value < 1e-5 ? 1 : 0)} us` : '0 s';
}

export function size(bytes) {
  for (const [unit, factor] of [['TB', 1e12], ['GB', 1e9], ['MB', 1e6], ['kB', 1e3]]) {
    if (bytes >= factor) {
      const value = bytes / factor;
      return `${value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2)} ${unit}`;
    }
  }
  return `${Math.round(bytes)} B`;
}

export const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)}\u00a0%`;
export const count = (number) => Number(number).toLocaleString('en', { maximumFractionDigits: 2 });
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
