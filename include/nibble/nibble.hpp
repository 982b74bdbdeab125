// Everything nibble offers, in one include.
#pragma once

#include "nibble/checkpoint.hpp"
#include "nibble/conv.hpp"
#include "nibble/cuda.hpp"
#include "nibble/device.hpp"
#include "nibble/epilogue.hpp"
#include "nibble/parallel.hpp"
#include "nibble/pattern.hpp"
#include "nibble/plan.hpp"
#include "nibble/quantize.hpp"
#include "nibble/scheme.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"
#include "nibble/types.hpp"
#include "nibble/verify.hpp"
#include "nibble/version.hpp"
