// An object in the memory of a peer on this host, mapped here under a hold.
#pragma once
#include "python/views.h"

namespace tl::python {

class MappedView : public View {
 public:
  // Takes the hold and waits for the mappings.
  MappedView(Engine& engine, std::shared_ptr<ShmConnection> connection, Descriptor descriptor, double timeout_s);
  std::string_view meta(std::string_view beside, const Limit& limit) override;
  const std::vector<Extent>& payload(const Limit& limit) override;
  PyObject* unpack(std::string_view beside, PyObject* like, bool copy, const Limit& limit) override;

 private:
  void await_mappings(Engine& engine, ShmConnection& connection, double timeout_s);

  std::shared_ptr<Lease> lease_;
  std::vector<Extent> payload_;
  std::string meta_;
};

}  // namespace tl::python
