// Named barriers of up to three warpgroups: among the threads of one, and to pass a turn
// from one to the next. Their names are constants: a run-time name makes the compiler
// reserve all sixteen.
#pragma once

#include "tile/common.cuh"

namespace tracea {

// Barrier 1, 2 or 3: waits for all threads of the warpgroup.
TRACEA_DEVICE void meet_warpgroup(int warpgroup) {
  if (warpgroup == 0) {
    asm volatile("bar.sync 1, 128;" ::: "memory");
  } else if (warpgroup == 1) {
    asm volatile("bar.sync 2, 128;" ::: "memory");
  } else {
    asm volatile("bar.sync 3, 128;" ::: "memory");
  }
}

// Barrier 4, 5 or 6: all of the warpgroup that waits for its turn meet all of the one that
// grants it. A turn must not be granted again before it was taken.
TRACEA_DEVICE void await_turn(int warpgroup) {
  if (warpgroup == 0) {
    asm volatile("bar.sync 4, 256;" ::: "memory");
  } else if (warpgroup == 1) {
    asm volatile("bar.sync 5, 256;" ::: "memory");
  } else {
    asm volatile("bar.sync 6, 256;" ::: "memory");
  }
}
TRACEA_DEVICE void grant_turn(int warpgroup) {
  if (warpgroup == 0) {
    asm volatile("bar.arrive 4, 256;" ::: "memory");
  } else if (warpgroup == 1) {
    asm volatile("bar.arrive 5, 256;" ::: "memory");
  } else {
    asm volatile("bar.arrive 6, 256;" ::: "memory");
  }
}

}  // namespace tracea
