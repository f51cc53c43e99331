#include "textflag.h"

// func load32(p *uint32) uint32
//
// What is read after the register is read after it from memory, too (DMB OSHLD).
TEXT ·load32(SB), NOSPLIT, $0-12
	MOVD  p+0(FP), R0
	MOVWU (R0), R1
	DMB   $1
	MOVW  R1, ret+8(FP)
	RET

// func store32(p *uint32, v uint32)
//
// Queue entries are in memory before their doorbell is rung (DMB OSHST).
TEXT ·store32(SB), NOSPLIT, $0-12
	MOVD  p+0(FP), R0
	MOVWU v+8(FP), R1
	DMB   $2
	MOVW  R1, (R0)
	RET

// func readBarrier()
//
// Entries are read after their phase (DMB OSHLD).
TEXT ·readBarrier(SB), NOSPLIT, $0-0
	DMB $1
	RET

// func load64(p *uint64) uint64
TEXT ·load64(SB), NOSPLIT, $0-16
	MOVD p+0(FP), R0
	MOVD (R0), R1
	MOVD R1, ret+8(FP)
	RET

// func store64(p *uint64, v uint64)
TEXT ·store64(SB), NOSPLIT, $0-16
	MOVD p+0(FP), R0
	MOVD v+8(FP), R1
	MOVD R1, (R0)
	RET

// func fullBarrier()
//
// DMB OSH.
TEXT ·fullBarrier(SB), NOSPLIT, $0-0
	DMB $3
	RET
