#include "textflag.h"

// func load32(p *uint32) uint32
TEXT ·load32(SB), NOSPLIT, $0-12
	MOVQ p+0(FP), AX
	MOVL (AX), AX
	MOVL AX, ret+8(FP)
	RET

// func store32(p *uint32, v uint32)
//
// Stores are seen in their order, so that queue entries are there before their doorbell.
TEXT ·store32(SB), NOSPLIT, $0-12
	MOVQ p+0(FP), AX
	MOVL v+8(FP), CX
	MOVL CX, (AX)
	RET

// func readBarrier()
TEXT ·readBarrier(SB), NOSPLIT, $0-0
	RET

// func load64(p *uint64) uint64
TEXT ·load64(SB), NOSPLIT, $0-16
	MOVQ p+0(FP), AX
	MOVQ (AX), AX
	MOVQ AX, ret+8(FP)
	RET

// func store64(p *uint64, v uint64)
TEXT ·store64(SB), NOSPLIT, $0-16
	MOVQ p+0(FP), AX
	MOVQ v+8(FP), CX
	MOVQ CX, (AX)
	RET

// func fullBarrier()
TEXT ·fullBarrier(SB), NOSPLIT, $0-0
	MFENCE
	RET
