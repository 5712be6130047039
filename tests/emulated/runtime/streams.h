// A stream is a queue and a thread that works it off.
#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "emulated.h"

namespace emulated {

struct Work {
  std::string name;
  std::function<void()> run;
  bool signals = false;  // runs after a fault too: others wait for it
  cudaGraphNodeType type = cudaGraphNodeTypeKernel;
};

// What was put on a stream while it was captured.
struct Node {
  Work work;
  std::vector<Range> ranges;
  cudaEvent_t event = nullptr;  // to be recorded, in place of the work
};

struct Capture {
  std::thread::id thread;
  bool broken = false;  // something was asked that cannot be recorded
  std::vector<Node> nodes;
};

class Stream {
 public:
  Stream(int number, int device);
  const int number;  // in the order of creation, over all devices
  const int device;

  // Books the work with order(), then queues it; or notes it, if the stream is captured.
  void put(Work work, const std::vector<Range>& ranges = {});
  bool idle();
  void drain();        // waits until nothing is queued or running
  void synchronize();  // drain(), and the host learns that all is done
  void close();        // its thread ends when the queue is empty

  bool begin_capture();                    // false if it is captured already
  std::unique_ptr<Capture> end_capture();  // nullptr if it is not
  cudaStreamCaptureStatus captured();
  // The error of a call that cannot be recorded, which ends the capture as well; success without one.
  cudaError_t refuse_in_capture();
  bool note(Node node);  // false if it is not captured

 private:
  void work_off();
  void delay();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  bool busy_ = false, closed_ = false, started_ = false;
  std::unique_ptr<Capture> capture_;
  std::mt19937_64 random_;
};

// All streams of the process, the devices' legacy streams among them.
class Streams {
 public:
  Stream* create(int device);
  Stream* find(cudaStream_t handle);  // of this thread's device for the legacy handles; nullptr when unknown
  bool destroy(cudaStream_t handle);
  void synchronize(int device);  // -1: all devices

 private:
  Stream* legacy(int device);

  std::mutex mutex_;
  std::vector<Stream*> all_;  // never freed: threads may hold on to them
  std::unordered_map<const void*, Stream*> open_;
  std::unordered_map<int, Stream*> legacy_;
};

Streams& streams();

// Records the event at this point of the stream: a wait or a query asks about that from now on.
void record(cudaEvent_t event, Stream* stream);

// The error of a call that no thread may make while it captures, in the mode that keeps to the thread.
cudaError_t refuse_while_capturing();

// Time that `bytes` take on the link between host and device.
void take_link_time(std::size_t bytes);

}  // namespace emulated
