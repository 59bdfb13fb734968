// One thread owns a manager and its pool. C++ callers are told so; Python callers, whose threads
// run while the GIL is released inside a call, are stopped: a second call that comes while one is
// under way raises instead of corrupting records. Read and written with the GIL held only, so it
// needs no atomics.
#pragma once

#include <thread>

#include "kvleaf/leaf/errors.h"

namespace kvleaf::python {

class Exclusive {
 public:
  /// One call. Declare it before anything that releases the GIL, so that it ends with the GIL held.
  class Use {
   public:
    Use(Exclusive& object, const char* who) : object_(object) {
      object_.require_free(who, /*from_callback=*/false);
      object_.depth_ = 1;
      object_.thread_ = std::this_thread::get_id();
    }
    ~Use() { object_.depth_ = 0; }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    Exclusive& object_;
  };

  /// What a leaf or a callback may ask, from inside a call of its own thread.
  void require_readable(const char* who) const { require_free(who, /*from_callback=*/true); }

 private:
  void require_free(const char* who, bool from_callback) const {
    if (depth_ == 0) return;
    if (thread_ != std::this_thread::get_id()) {
      throw KVError(std::string(who) + " is in use by another thread: one thread owns it");
    }
    if (!from_callback) {
      throw KVError(std::string(who) +
                    " is in use: a leaf or a callback, called from inside a call, may only ask");
    }
  }

  int depth_ = 0;
  std::thread::id thread_;
};

}  // namespace kvleaf::python
