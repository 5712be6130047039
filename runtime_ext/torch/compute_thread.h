// The threads of this process that run ops.
#pragma once

namespace disco {

// Makes the calling thread, and nothing else, one that runs ops of an engine with `count` OpenMP threads.
void prepare_compute_thread(int count);

// Tells the malloc watch, where there is one, of the calling thread and its `workers` OpenMP threads, which
// stay the same as long as it lives; and that the calling thread runs no ops any more.
void watch_thread(int workers);
void unwatch_thread();

}  // namespace disco
